"""Entry points that vLLM loads. Invariant: unless VLLM_PLUGINS names us they change nothing."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import State

PLUGIN = "vllm_rollout"
"""Our name in VLLM_PLUGINS, which every process of the server inherits: `vllm-rollout serve` puts it there."""


def register() -> None:
    """General plugin: loaded in every process, before the API process looks up its engine client class.

    vLLM has no setting for that class. It imports the name when it builds the client, so one name is replaced by a
    subclass, which leaves every request without our fields to the original.
    """
    if PLUGIN not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    from vllm.v1.engine import async_llm

    from vllm_rollout.adapter.client import RolloutAsyncLLM
    from vllm_rollout.adapter.compat import check_vllm_version
    from vllm_rollout.adapter.core import add_rollout_calls

    check_vllm_version()
    add_rollout_calls()
    async_llm.AsyncLLM = RolloutAsyncLLM  # type: ignore[misc]


class RolloutEndpoints:
    """Endpoint plugin: our routes on vLLM's app."""

    name = PLUGIN
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        from vllm_rollout.server.routes import router

        app.include_router(router)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        from vllm_rollout.adapter.client import RolloutAsyncLLM
        from vllm_rollout.adapter.engine import VLLMEngine
        from vllm_rollout.adapter.state_file import StateFile
        from vllm_rollout.server.recorder import TraceRecorder
        from vllm_rollout.server.service import RolloutService

        if not isinstance(engine_client, RolloutAsyncLLM):
            raise RuntimeError(
                f"the rollout endpoints need vllm_rollout's engine client, found {type(engine_client).__name__}. "
                "Start the server with `vllm-rollout serve` instead of `vllm serve`."
            )
        engine = VLLMEngine(engine_client, state)
        if args.rollout_profile is not None:
            await engine.use_profile(args.rollout_profile)
        recorder = None if args.rollout_record is None else TraceRecorder(Path(args.rollout_record))
        if args.rollout_state is not None:
            state_file = StateFile(args.rollout_state, engine, engine_client)
            if engine_client.client_index == 0:
                await state_file.load()
        state.rollout_service = RolloutService(engine, engine_client.rollout_metrics, recorder=recorder)

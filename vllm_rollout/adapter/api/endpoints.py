"""Endpoint plugin: our routes on vLLM's app. Invariant: vLLM loads it only if VLLM_PLUGINS names us."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import State

from vllm_rollout.adapter import PLUGIN


class RolloutEndpoints:
    """What `vllm.endpoint_plugins` names."""

    name = PLUGIN
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        from vllm_rollout.adapter.api.open_paths import OpenPaths
        from vllm_rollout.adapter.api.refusals import refuse_our_fields_in_beam_search
        from vllm_rollout.server.routes import router

        refuse_our_fields_in_beam_search()
        app.include_router(router)
        app.add_middleware(OpenPaths)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        from vllm_rollout.adapter.api.client import RolloutAsyncLLM
        from vllm_rollout.adapter.api.engine import VLLMEngine
        from vllm_rollout.adapter.api.parallelism import parallelism_of
        from vllm_rollout.adapter.api.state_file import StateFile
        from vllm_rollout.server.engines.service import EnginesService
        from vllm_rollout.server.recorder import TraceRecorder
        from vllm_rollout.server.runs.folder import LEARNED, RUNS
        from vllm_rollout.server.runs.service import RunService
        from vllm_rollout.server.runs.store import RunStore
        from vllm_rollout.server.service import RolloutService

        if not isinstance(engine_client, RolloutAsyncLLM):
            raise RuntimeError(
                f"the rollout endpoints need vllm_rollout's engine client, found {type(engine_client).__name__}. "
                "Start the server with `vllm-rollout serve` instead of `vllm serve`."
            )
        engine = VLLMEngine(engine_client, state)
        if args.rollout_profile is not None:
            await engine.use_profile(args.rollout_profile)
        elif args.emulate is not None:
            engine.use_emulated_cost(args.emulate)
        recorder = None if args.rollout_record is None else TraceRecorder(Path(args.rollout_record))
        store = RunStore()
        if args.rollout_state is not None:
            folder = Path(args.rollout_state)
            state_file = StateFile(folder / LEARNED, engine, engine_client)
            if engine_client.client_index == 0:
                await state_file.load()
            store = RunStore(folder / RUNS)
        metrics = engine_client.rollout_metrics
        engine_client.life.watch()
        engine.follow_holds()
        service = RolloutService(engine, metrics, recorder=recorder, admin_key=args.rollout_admin_key)
        state.rollout_service = service
        state.engines_service = EnginesService(engine, lambda: service.progress)
        num_processes = engine_client.num_api_processes
        parallelism = parallelism_of(args, engine_client, engine)
        state.run_service = RunService(state.rollout_service, engine, store, metrics, num_processes, parallelism)

"""The services of one engine, placed where their routes look for them.

Invariant: a server and a trainer's own process have the same services.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from vllm.logger import init_logger

from vllm_rollout import background
from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.kernel.api.client import RolloutAsyncLLM
from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.kernel.api.state_folder import FolderLock
from vllm_rollout.kernel.http.service import RolloutService

logger = init_logger("vllm.vllm_rollout")

STOP_S = 10.0
"""Longest time for parts to keep what must outlive the server."""


async def build_services(client: RolloutAsyncLLM, app: FastAPI, settings: Namespace) -> VLLMEngine:
    """Build the services and put them into the app's state. Returns the engine that they share.

    The state already has models and renderer. `settings`: our flags. Raises: RuntimeError, which ends the start, for
    flags that do not work here.
    """
    state, is_first = app.state, client.client_index == 0
    engine = VLLMEngine(client, state)
    folder = None if settings.rollout_state is None or not is_first else Path(settings.rollout_state)
    if folder is not None:
        state.rollout_folder = FolderLock(folder)
    for part in engine.parts:
        await part.start(settings)
    if folder is not None:
        staged = "".join(part.staged for part in engine.parts)
        for part in engine.parts:
            await part.take_up(staged)
    if settings.rollout_state is not None:
        client.before_shutdown = partial(_stop, engine, asyncio.get_running_loop(), settings.rollout_state)
    client.life.watch()
    metrics = client.rollout_metrics
    background.count_with(metrics.task_failed)
    audit_ratio = ServeOptions.of(client.vllm_config).audit_ratio
    state.rollout_service = RolloutService(
        engine, metrics, admin_key=settings.rollout_admin_key, audit_ratio=audit_ratio
    )
    client.when_aborted = state.rollout_service.aborts.named
    client.when_all_aborted = state.rollout_service.aborts.all
    for part in engine.parts:
        part.serve(app)
    return engine


def _stop(engine: VLLMEngine, loop: asyncio.AbstractEventLoop, folder: str) -> None:
    """Let parts keep what they know. Called on a thread of its own, before the engine is stopped."""
    try:
        if not loop.is_running():  # the engine died, and the server ended because of it
            raise RuntimeError("the engine is dead")
        asyncio.run_coroutine_threadsafe(engine.stop(), loop).result(STOP_S)
    except Exception as error:  # the server ends in any case
        logger.warning("vllm_rollout: --rollout-state %s is the one of the last save: %r", folder, error)

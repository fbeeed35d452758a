"""The part in the API process: runs, which are in the first one."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from fastapi import FastAPI

from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.kernel.api.open_paths import keyless_namespace
from vllm_rollout.kernel.http.ports import ApiPart
from vllm_rollout.parts.rounds.http.service import RunService
from vllm_rollout.parts.rounds.http.store import RUNS, RunStore


class RoundsApi(ApiPart):
    """Overrides: staged, start, serve."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine
        self._store = RunStore()

    @property
    def staged(self) -> str:
        return self._store.staged

    async def start(self, settings: Namespace) -> None:
        if settings.rollout_state is not None and not self._engine.client.client_index:
            self._store = RunStore(Path(settings.rollout_state) / RUNS, keyless=keyless_namespace(settings))

    def serve(self, app: FastAPI) -> None:
        client = self._engine.client
        if not client.client_index:
            rollouts, metrics = app.state.rollout_service, client.rollout_metrics
            app.state.run_service = RunService(rollouts, self._engine, self._store, metrics)

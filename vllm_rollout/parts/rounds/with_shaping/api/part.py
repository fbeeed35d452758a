"""Rounds that know lengths, in the API process: the order of waiting prompts, and the engine's size between rounds."""

from __future__ import annotations

from argparse import Namespace

from fastapi import FastAPI

from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.kernel.http.ports import ApiPart
from vllm_rollout.parts.rounds.with_shaping.api.parallelism import parallelism_of
from vllm_rollout.parts.rounds.with_shaping.http.parallelism import Parallelism
from vllm_rollout.parts.shaping.http.engine import ShapingPart


class ShapedRoundsApi(ApiPart):
    """Overrides: start, serve."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine
        self._parallelism: Parallelism | None = None

    async def start(self, settings: Namespace) -> None:
        self._parallelism = parallelism_of(settings, self._engine.client, self._engine)

    def serve(self, app: FastAPI) -> None:
        if hasattr(app.state, "run_service"):
            app.state.run_service.length_history = self._engine.part(ShapingPart).length_history
            if self._parallelism is not None:
                app.state.run_service.resize_by(self._parallelism)

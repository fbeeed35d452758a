"""The part in the API process: learning, with the learned state on disk if the flags say so."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.parts.pruning.api.learning import EngineLearning
from vllm_rollout.parts.pruning.api.state_file import LEARNED, StateFile


class PruningApi(EngineLearning):
    """Overrides: start, take_up."""

    def __init__(self, engine: VLLMEngine) -> None:
        super().__init__(engine.calls)
        self._client = engine.client

    async def start(self, settings: Namespace) -> None:
        if settings.rollout_state is not None:
            self._file = StateFile(Path(settings.rollout_state) / LEARNED, self, self._calls, self._client)

    async def take_up(self, folder: Path, staged: str) -> None:
        await self._file.load(staged)

"""The part in the API process: learning, with the learned state on disk if the flags say so."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.parts.pruning.api.learning import EngineLearning
from vllm_rollout.parts.pruning.api.state_file import LEARNED, StateFile


class PruningApi(EngineLearning):
    """Overrides: start, take_up, stop."""

    _file: StateFile | None = None

    def __init__(self, engine: VLLMEngine) -> None:
        super().__init__(engine.calls)

    async def start(self, settings: Namespace) -> None:
        if settings.rollout_state is not None:
            self._file = StateFile(Path(settings.rollout_state) / LEARNED, self, self._calls)

    async def take_up(self, staged: str) -> None:
        if self._file is not None:
            await self._file.load(staged)

    async def stop(self) -> None:
        if self._file is not None:
            await self._file.stop()

"""What was learned, in a file that survives the server.

Invariant: the file is whole at every moment; a crash while it is written leaves the one before.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from vllm.logger import init_logger

from vllm_rollout.adapter.api.client import RolloutAsyncLLM
from vllm_rollout.adapter.api.learning import EngineLearning
from vllm_rollout.server.engine import RequestError
from vllm_rollout.whole_file import write_whole

logger = init_logger("vllm.vllm_rollout")

SAVE_INTERVAL_S = 30.0
SAVE_TIMEOUT_S = 10.0


class StateFile:
    """Loads at start; saves while something is learned (`SAVE_INTERVAL_S`), and when the server ends."""

    def __init__(self, path: Path, engine: EngineLearning, client: RolloutAsyncLLM) -> None:
        self._path = path
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._saving: asyncio.Task[None] | None = None
        self._saved_all = True
        """Nothing was learned since the last save began."""
        engine.after_change = self._save_soon
        client.before_shutdown = self._save_at_shutdown

    async def load(self) -> None:
        """Raises: RuntimeError, which ends the start, for a file that is not of this model or not one of ours."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._path.exists():
            logger.info("vllm_rollout: %s does not exist yet; what is learned will be kept there", self._path)
            return
        try:
            await self._engine.set_learning_state(self._path.read_bytes())
        except RequestError as error:
            raise RuntimeError(
                f"--rollout-state {self._path}: {error} Name another file, or remove this one to start anew."
            ) from error
        logger.info("vllm_rollout: restored what was learned from %s", self._path)

    async def save(self) -> None:
        async with self._lock:
            state = await self._engine.learning_state()
            await asyncio.to_thread(write_whole, self._path, state)

    def _save_soon(self) -> None:
        """Save now, and what comes within the interval after that at its end."""
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save_and_rest())
        else:
            self._saved_all = False

    async def _save_and_rest(self) -> None:
        self._saved_all = False
        while not self._saved_all:
            self._saved_all = True
            try:
                await self.save()
            except (RequestError, OSError) as error:
                logger.warning("vllm_rollout: --rollout-state %s was not written: %s", self._path, error)
            await asyncio.sleep(SAVE_INTERVAL_S)

    def _save_at_shutdown(self) -> None:
        """Called on a thread of its own, before the engine is told to stop."""
        if not self._loop.is_running():  # the engine died, and the server ended because of it
            logger.warning("vllm_rollout: %s is the one of the last training: the engine is dead", self._path)
            return
        try:
            asyncio.run_coroutine_threadsafe(self.save(), self._loop).result(SAVE_TIMEOUT_S)
            logger.info("vllm_rollout: kept what was learned in %s", self._path)
        except Exception as error:  # the server is going, with or without us
            logger.warning("vllm_rollout: %s is the one of the last training: %r", self._path, error)

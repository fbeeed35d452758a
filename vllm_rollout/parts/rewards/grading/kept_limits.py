"""Time limits in a file, so that a grader continues to learn where another one stopped.

Invariant: a limit in the file is never lowered, so that several processes may share the file.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from pathlib import Path

import msgspec

from vllm_rollout.background import spawn
from vllm_rollout.parts.rewards.rules.time_limits import TimeLimits
from vllm_rollout.whole_file import write_whole

logger = logging.getLogger(__name__)

SAVE_INTERVAL_S = 5.0


class KeptLimits:
    """Keeps time limits in the file `path`, which need not exist yet. Raises: ValueError for a file of another kind."""

    def __init__(self, path: Path, limits: TimeLimits) -> None:
        self._path = path
        self._limits = limits
        self._saving: asyncio.Task[None] | None = None
        if path.exists():
            limits.restore(self._read())

    def changed(self) -> None:
        """Schedule a write: the file has the learned limits within `SAVE_INTERVAL_S`."""
        if self._saving is None:
            self._saving = spawn(self._save(), "time limits on disk")

    async def _save(self) -> None:
        await asyncio.sleep(SAVE_INTERVAL_S)
        self._saving = None  # what is learned from here on is for the next time
        try:
            await asyncio.to_thread(self._merge, self._limits.export())
        except (OSError, ValueError) as error:
            logger.warning("the time limits in %s are not written: %s", self._path, error)

    def _merge(self, anchors: dict[str, float]) -> None:
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # until it is closed
            before = self._read() if self._path.exists() else {}
            merged = before | {case: max(seconds, before.get(case, 0.0)) for case, seconds in anchors.items()}
            write_whole(self._path, msgspec.json.encode(dict(list(merged.items())[-self._limits.max_cases :])))
        finally:
            os.close(folder)

    def _read(self) -> dict[str, float]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, float])
        except msgspec.DecodeError as error:
            raise ValueError(f"{self._path} has no time limits ({error}). Remove it to learn them anew.") from error

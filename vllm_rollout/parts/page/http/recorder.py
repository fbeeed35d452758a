"""Writes rollouts to a trace file, and what other parts record. Invariant: a failed write never fails a rollout."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from vllm_rollout.kernel.rules.rewards import Reward
from vllm_rollout.parts.page.http.watched import WatchedRollout
from vllm_rollout.parts.page.recording.file import TraceFile
from vllm_rollout.parts.page.recording.rows import Row, reward_row

MAX_MISSING = 4096
"""Most rollouts and groups of sessions without a row that are remembered."""

logger = logging.getLogger("vllm.vllm_rollout")


class TraceRecorder:
    """Appends one row per rollout or group of sessions, and one for the rewards of a request."""

    def __init__(self, path: Path, max_bytes: int = 0) -> None:
        """`max_bytes`: as of TraceFile. Raises: OSError for a path that cannot be written."""
        self._path = path
        self._file = TraceFile(path, max_bytes)
        self._num_lost = 0
        """Rows that were lost since the last one that was written."""
        self._missing: OrderedDict[str, None] = OrderedDict()
        """Names without a row, because the row could not be written. Rewards of them are not recorded either."""

    def rollout_over(self, watched: WatchedRollout) -> None:
        """Record the prompts whose group is over. If the client went away, these are not all of them."""
        row = watched.row()
        if row.prompts:
            self.append_first(watched.rollout.id, row)

    def rewards_posted(self, rollout_id: str, rewards: Iterable[Reward]) -> None:
        """Record rewards that were accepted."""
        posted = [(reward.prompt_id, reward.index, reward.reward) for reward in rewards]
        if posted:
            self.append_later(rollout_id, reward_row(rollout_id, posted))

    def append_first(self, id: str, row: Row) -> None:
        """Append the first row of `id`, which later rows refer to."""
        if not self._append(row.model_dump_json(exclude_none=True, exclude_defaults=True)):
            self._missing[id] = None
            if len(self._missing) > MAX_MISSING:
                self._missing.popitem(last=False)

    def append_later(self, id: str, row: str) -> None:
        """Append a row that refers to the first row of `id`, unless that row is missing."""
        if id not in self._missing:
            self._append(row)

    def _append(self, row: str) -> bool:
        """Append a row. True if it was written. A change of that is logged."""
        try:
            self._file.append(row)
        except OSError as error:
            if not self._num_lost:
                self._warn(f"{error}. Rows are left out until it goes.")
            self._num_lost += 1
            return False
        if self._num_lost:
            self._warn(f"goes on; {self._num_lost} rows are missing.")
            self._num_lost = 0
        return True

    def _warn(self, what: str) -> None:
        logger.warning("vllm_rollout: --rollout-record %s: %s", self._path, what)

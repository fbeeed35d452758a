"""Rollouts -> a trace file for `vllm-rollout simulate`. Invariant: what cannot be written never fails a rollout."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from vllm_rollout.group.judging.ledger import Reward
from vllm_rollout.server.rollout import Rollout
from vllm_rollout.trace.file import TraceFile
from vllm_rollout.trace.rows import reward_row

MAX_MISSING = 4096
"""Rollouts without a row that are remembered."""

logger = logging.getLogger("vllm.vllm_rollout")


class TraceRecorder:
    """Appends one row per rollout, and one for the rewards of a request."""

    def __init__(self, path: Path, max_bytes: int = 0) -> None:
        """`max_bytes`: as of TraceFile. Raises: OSError for a path that cannot be written."""
        self._path = path
        self._file = TraceFile(path, max_bytes)
        self._num_lost = 0
        """Rows since the last one that was written."""
        self._missing: OrderedDict[str, None] = OrderedDict()
        """Rollouts whose row could not be written: rewards of theirs would say nothing."""

    def rollout_over(self, rollout: Rollout) -> None:
        """Records the prompts whose group is over: of a rollout whose client went away, not all of them."""
        row = rollout.row()
        if row.prompts and not self._append(row.model_dump_json(exclude_none=True, exclude_defaults=True)):
            self._missing[rollout.id] = None
            if len(self._missing) > MAX_MISSING:
                self._missing.popitem(last=False)

    def rewards_posted(self, rollout_id: str, rewards: Iterable[Reward]) -> None:
        """Rewards that were accepted."""
        posted = [(reward.prompt_id, reward.index, reward.reward) for reward in rewards]
        if posted and rollout_id not in self._missing:
            self._append(reward_row(rollout_id, posted))

    def _append(self, row: str) -> bool:
        """Whether it was written. Said when that changes."""
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

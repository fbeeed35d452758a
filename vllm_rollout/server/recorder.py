"""Rollouts and groups of sessions -> a trace file. Invariant: what cannot be written never fails a rollout."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from vllm_rollout.group.judging.ledger import Reward
from vllm_rollout.group.racing.sessions import Session
from vllm_rollout.server.rollout import Rollout
from vllm_rollout.server.sessions.groups import OpenGroup
from vllm_rollout.server.sessions.seen import recorded
from vllm_rollout.trace.file import TraceFile
from vllm_rollout.trace.rows import Row, reward_row
from vllm_rollout.trace.session_rows import SessionReward, SessionRewardRow

MAX_MISSING = 4096
"""Rollouts and groups of sessions without a row that are remembered."""

logger = logging.getLogger("vllm.vllm_rollout")


class TraceRecorder:
    """Appends one row per rollout or group of sessions, and one for the rewards of a request."""

    def __init__(self, path: Path, max_bytes: int = 0) -> None:
        """`max_bytes`: as of TraceFile. Raises: OSError for a path that cannot be written."""
        self._path = path
        self._file = TraceFile(path, max_bytes)
        self._num_lost = 0
        """Rows since the last one that was written."""
        self._missing: OrderedDict[str, None] = OrderedDict()
        """What has no row, since it could not be written: rewards of it would say nothing."""

    def rollout_over(self, rollout: Rollout) -> None:
        """Records the prompts whose group is over: of a rollout whose client went away, not all of them."""
        row = rollout.row()
        if row.prompts:
            self._append_first(rollout.id, row)

    def rewards_posted(self, rollout_id: str, rewards: Iterable[Reward]) -> None:
        """Rewards that were accepted."""
        posted = [(reward.prompt_id, reward.index, reward.reward) for reward in rewards]
        if posted and rollout_id not in self._missing:
            self._append(reward_row(rollout_id, posted))

    def sessions_over(self, group: OpenGroup) -> None:
        """Records a group that is over, or was cancelled, and of which nothing runs; without a session it is no row."""
        if group.race.sessions:
            self._append_first(group.engine_id, recorded(group))

    def session_rewarded(self, group: OpenGroup, session: Session) -> None:
        """It was finished after its group was recorded."""
        if session.reward is not None and group.engine_id not in self._missing:
            reward = SessionReward(index=session.index, reward=session.reward)
            self._append(SessionRewardRow(name=group.engine_id, rewards=[reward]).model_dump_json())

    def _append_first(self, id: str, row: Row) -> None:
        """The row that others may refer to."""
        if not self._append(row.model_dump_json(exclude_none=True, exclude_defaults=True)):
            self._missing[id] = None
            if len(self._missing) > MAX_MISSING:
                self._missing.popitem(last=False)

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

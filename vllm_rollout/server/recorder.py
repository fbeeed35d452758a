"""Rollouts -> a trace file for `vllm-rollout simulate`. Invariant: what cannot be written never fails a rollout."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from vllm_rollout.group.judging.ledger import Reward
from vllm_rollout.server.engine import CandidateEnd, PreparedPrompt
from vllm_rollout.server.rollout import Rollout
from vllm_rollout.server.shaping import history_key
from vllm_rollout.trace.file import TraceFile
from vllm_rollout.trace.rows import RolloutPrompt, reward_row, trace_row, traced_prompt

logger = logging.getLogger("vllm.vllm_rollout")


class TraceRecorder:
    """Appends one row per rollout, and one for the rewards of a request."""

    def __init__(self, path: Path) -> None:
        """Raises: OSError for a path that cannot be written."""
        self._path = path
        self._file: TraceFile | None = TraceFile(path)

    def rollout_over(self, rollout: Rollout) -> None:
        """Records the prompts whose group is over: of a rollout whose client went away, not all of them."""
        if not rollout.outcome.records:
            return
        plan = rollout.plans[0].group
        row = trace_row(
            rollout.id,
            rollout.model,
            plan.group_size,
            max((prompt.max_tokens for prompt in rollout.prompts if prompt.max_tokens is not None), default=None),
            [record for _, record in sorted(rollout.outcome.records.items())],
            detection_length=None if plan.pruning is None else plan.pruning.detection_length,
        )
        self._append(row)

    def rewards_posted(self, rollout_id: str, rewards: Iterable[Reward]) -> None:
        """Rewards that were accepted."""
        posted = [(reward.prompt_id, reward.index, reward.reward) for reward in rewards]
        if posted:
            self._append(reward_row(rollout_id, posted))

    def _append(self, row: str) -> None:
        if self._file is None:
            return
        try:
            self._file.append(row)
        except OSError as error:
            logger.warning("vllm_rollout: --rollout-record %s: %s. Nothing more is recorded.", self._path, error)
            self._file = None


def recorded(prompt: PreparedPrompt, key: str, ends: Iterable[CandidateEnd]) -> RolloutPrompt:
    """One prompt of a rollout's row; `key` names it over all rollouts."""
    ends = list(ends)
    own_key = "" if key == history_key(prompt.id, ()) else key
    scores = {end.ending.index: end.assessment.score for end in ends if end.assessment is not None}
    return traced_prompt(prompt.id, len(prompt.token_ids), [end.ending for end in ends], scores, key=own_key)

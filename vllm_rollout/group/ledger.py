"""Candidates whose reward may still come. Invariant: a reward counts once, and never vanishes in silence."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Literal

from vllm_rollout.config import MAX_REMEMBERED_CANDIDATES
from vllm_rollout.group.pruning_plan import PruningPlan
from vllm_rollout.group.types import Assessment, CandidateState, Observation

RewardStatus = Literal["accepted", "duplicate", "conflict", "unknown", "unfinished", "unscored"]
"""What became of a posted reward.

accepted    it teaches calibration and head
duplicate   the same reward came before; nothing changes
conflict    another reward came before, and stays
unknown     no such candidate
unfinished  the candidate is running, or was stopped (pruned, surplus, failed): no reward is expected
unscored    the candidate ended before `detection_length`: there is nothing to learn from
"""


@dataclass(slots=True)
class LedgerEntry:
    """One candidate of a rollout with pruning."""

    request_id: str
    prompt_id: str
    plan: PruningPlan
    state: CandidateState = "running"
    num_tokens: int = 0
    observation: Observation | None = None
    assessment: Assessment | None = None
    reward: float | None = None


class Ledger:
    """All candidates that a reward could name, by rollout. The oldest rollouts are forgotten first."""

    def __init__(self, max_candidates: int = MAX_REMEMBERED_CANDIDATES) -> None:
        self._rollouts: OrderedDict[str, dict[tuple[str, int], LedgerEntry]] = OrderedDict()
        self._max_candidates = max_candidates
        self._num_candidates = 0

    def __len__(self) -> int:
        return self._num_candidates

    def detection_length(self, rollout_id: str) -> int | None:
        """Of the rollout's candidates, which share one plan; None when it is not remembered."""
        entries = self._rollouts.get(rollout_id)
        return None if entries is None else next(iter(entries.values())).plan.detection_length

    def open(self, rollout_id: str, prompt_id: str, index: int, request_id: str, plan: PruningPlan) -> LedgerEntry:
        """A candidate was launched. What happens to it is written into the entry."""
        entry = LedgerEntry(request_id, prompt_id, plan)
        rollout = self._rollouts.setdefault(rollout_id, {})
        self._num_candidates += (prompt_id, index) not in rollout  # a group id may be used again
        rollout[prompt_id, index] = entry
        while self._num_candidates > self._max_candidates and len(self._rollouts) > 1:
            _, forgotten = self._rollouts.popitem(last=False)
            self._num_candidates -= len(forgotten)
        return entry

    def reward(
        self, rollout_id: str, prompt_id: str, index: int, reward: float
    ) -> tuple[RewardStatus, LedgerEntry | None]:
        """Account for a posted reward; the entry comes with status `accepted` only."""
        entry = self._rollouts.get(rollout_id, {}).get((prompt_id, index))
        if entry is None:
            return "unknown", None
        if entry.state != "finished":
            return "unfinished", None
        if entry.assessment is None:
            return "unscored", None
        if entry.reward is not None:
            return ("duplicate" if entry.reward == reward else "conflict"), None
        entry.reward = reward
        return "accepted", entry

    def num_awaiting(self) -> Counter[int]:
        """Scored candidates that finished and have no reward yet, by detection length."""
        return Counter(
            entry.plan.detection_length
            for rollout in self._rollouts.values()
            for entry in rollout.values()
            if entry.reward is None and entry.assessment is not None and entry.state == "finished"
        )

"""Candidates whose reward may still come. Invariant: a reward counts once, and never vanishes in silence."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Literal, NamedTuple

from vllm_rollout.config import MAX_REMEMBERED_CANDIDATES
from vllm_rollout.group.pruning_plan import PruningPlan
from vllm_rollout.group.types import Assessment, CandidateState, Observation

RewardStatus = Literal["accepted", "duplicate", "conflict", "unknown", "unfinished", "unscored"]
"""What became of a posted reward.

accepted    it teaches calibration and head
duplicate   the same reward came before; nothing changes
conflict    another reward came before, and stays
unknown     no such candidate, or one that has been forgotten
unfinished  the candidate is running, or was stopped (pruned, surplus, failed): no reward is expected
unscored    the candidate ended before `detection_length`: there is nothing to learn from
"""


class Reward(NamedTuple):
    """The reward of one trajectory, as the client posted it."""

    prompt_id: str
    index: int
    reward: float
    positive: bool
    """The reward is above the threshold: the label that calibration and head learn."""


class LedgerEntry:
    """One candidate of a rollout with pruning. The ledger counts along with what is written into it."""

    __slots__ = ("_assessment", "_counted", "_ledger", "_reward", "_state", "num_tokens", "observation", "plan",
                 "prompt_id", "request_id")  # fmt: skip

    def __init__(self, request_id: str, prompt_id: str, plan: PruningPlan, ledger: Ledger | None = None) -> None:
        self.request_id = request_id
        self.prompt_id = prompt_id
        self.plan = plan
        self.num_tokens = 0
        self.observation: Observation | None = None
        self._ledger = ledger
        """None once it is forgotten."""
        self._state: CandidateState = "running"
        self._assessment: Assessment | None = None
        self._reward: float | None = None
        self._counted: CandidateState | None = None

    @property
    def state(self) -> CandidateState:
        return self._state

    @state.setter
    def state(self, state: CandidateState) -> None:
        self._state = state
        self._count()

    @property
    def assessment(self) -> Assessment | None:
        return self._assessment

    @assessment.setter
    def assessment(self, assessment: Assessment | None) -> None:
        self._assessment = assessment
        self._count()

    @property
    def reward(self) -> float | None:
        return self._reward

    @reward.setter
    def reward(self, reward: float | None) -> None:
        self._reward = reward
        self._count()

    def forget(self) -> None:
        """Still to be written into, but no longer remembered."""
        self._count(remembered=False)
        self._ledger = None

    def _count(self, *, remembered: bool = True) -> None:
        if self._ledger is None:
            return
        scored = remembered and self._assessment is not None and self._reward is None
        counted = self._state if scored and self._state in ("running", "finished") else None
        if counted != self._counted:
            self._ledger.recount(self.plan.detection_length, self._counted, counted)
            self._counted = counted


class Ledger:
    """All candidates that a reward could name, by rollout. The oldest candidates of the oldest rollout go first."""

    def __init__(self, max_candidates: int = MAX_REMEMBERED_CANDIDATES) -> None:
        self._rollouts: OrderedDict[str, OrderedDict[tuple[str, int], LedgerEntry]] = OrderedDict()
        self._max_candidates = max_candidates
        self._num_candidates = 0
        self._scored: dict[CandidateState, Counter[int]] = {"running": Counter(), "finished": Counter()}
        """Scored candidates without a reward, by state and detection length."""

    def __len__(self) -> int:
        return self._num_candidates

    def detection_length(self, rollout_id: str) -> int | None:
        """Of the rollout's candidates, which share one plan; None when it is not remembered."""
        entries = self._rollouts.get(rollout_id)
        return None if entries is None else next(iter(entries.values())).plan.detection_length

    def open(self, rollout_id: str, prompt_id: str, index: int, request_id: str, plan: PruningPlan) -> LedgerEntry:
        """A candidate was launched. What happens to it is written into the entry."""
        rollout = self._rollouts.setdefault(rollout_id, OrderedDict())
        before = rollout.pop((prompt_id, index), None)  # a group id may be used again
        if before is not None:
            before.forget()
        entry = rollout[prompt_id, index] = LedgerEntry(request_id, prompt_id, plan, self)
        self._num_candidates += before is None
        while self._num_candidates > self._max_candidates:
            self._forget_oldest()
        return entry

    def take(self, rollout_id: str, prompt_id: str, index: int) -> LedgerEntry | None:
        """Let go of a candidate that goes on in another engine; None when it has been forgotten."""
        rollout = self._rollouts.get(rollout_id, {})
        entry = rollout.pop((prompt_id, index), None)
        if entry is None:
            return None
        entry.forget()
        self._num_candidates -= 1
        if not rollout:
            del self._rollouts[rollout_id]
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
        return +self._scored["finished"]

    def awaits(self, detection_length: int) -> bool:
        """A reward may come for a candidate scored at this length."""
        return any(counts[detection_length] for counts in self._scored.values())

    def recount(self, detection_length: int, before: CandidateState | None, now: CandidateState | None) -> None:
        """An entry counts as another kind of scored candidate, or as none."""
        if before is not None:
            self._scored[before][detection_length] -= 1
        if now is not None:
            self._scored[now][detection_length] += 1

    def _forget_oldest(self) -> None:
        rollout_id, rollout = next(iter(self._rollouts.items()))
        _, entry = rollout.popitem(last=False)
        entry.forget()
        self._num_candidates -= 1
        if not rollout:
            del self._rollouts[rollout_id]

"""One group of a replay, and its candidates. Invariant: a candidate that does not run knows how far it came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_rollout.group.judging.ledger import Scoring
from vllm_rollout.group.lengths.moments import LengthMoments
from vllm_rollout.group.plans.plan import GroupPlan
from vllm_rollout.group.racing.lifecycle import Group
from vllm_rollout.group.racing.race import RacePlace
from vllm_rollout.group.ranks.work import Work
from vllm_rollout.group.types import CandidateId, Ending
from vllm_rollout.simulator.pool import PoolCandidate


@dataclass(slots=True, eq=False)
class Race:
    """One group of a replay."""

    prompt_id: str
    plan: GroupPlan
    pool: Sequence[PoolCandidate]
    """`plan.num_candidates` of them."""
    prompt_tokens: int = 0
    scoring: Scoring | None = None
    """With pruning."""
    place: RacePlace | None = None
    """Its part in a race against other groups."""
    lengths: LengthMoments | None = None
    """What is known of them: of its prompt, else of the data set."""
    max_tokens: int | None = None
    candidates: list[Runner] = field(default_factory=list)
    group: Group = field(init=False)
    endings: tuple[Ending, ...] = ()
    """Of every candidate, when the group is over."""
    over_s: float = 0.0
    """When that was."""
    lost: bool = False
    """It completed after as many others as its race against other groups wanted."""
    num_holding: int = 0
    """Candidates that run now and share the prompt's KV cache."""

    @property
    def work(self) -> Work:
        """Of a group that has not begun."""
        return self.work_of([0] * self.plan.num_candidates)

    @property
    def ages_left(self) -> list[int]:
        """Tokens of each candidate that has not ended, if it has as many as the longest of those that have."""
        running = set(self.group.running)
        ended = (runner.num_tokens for runner in self.candidates if runner.index not in running)
        return [max(ended, default=0)] * len(running)

    def work_of(self, num_tokens: Sequence[int]) -> Work:
        """Of candidates that have so many."""
        return Work.of(num_tokens, self.lengths, self.max_tokens, self.prompt_tokens)

    def close(self, seconds: float) -> None:
        self.over_s = seconds
        self.endings = tuple(runner.ending for runner in self.candidates)


@dataclass(slots=True, eq=False)
class Runner:
    """One candidate of a race."""

    id: CandidateId
    race: Race
    future: PoolCandidate
    start: int | None = None
    """The step at which it had, or would have had, no token yet. None: it does not run."""
    num_tokens: int = 0
    """Up to date when it does not run."""
    num_behind_kv: float | None = None
    """Tokens that it computes when it runs next, since the KV of the others has come along; None: all are computed."""

    @property
    def index(self) -> int:
        return self.id.index

    @property
    def detection_length(self) -> int | None:
        """At which it is scored, if it lives that long; None when it has no score."""
        plan = self.race.plan.pruning
        return None if plan is None or self.future.score is None else plan.detection_length

    @property
    def ending(self) -> Ending:
        state = self.race.group.state(self.index)
        truncated = state == "finished" and self.future.end == "length"
        by_itself = self.future.end == "stop" and self.num_tokens == self.future.num_tokens and state != "pruned"
        return Ending(self.index, state, self.num_tokens, truncated, self.race.group.end_step(self.index), by_itself)

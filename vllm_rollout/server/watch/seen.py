"""What is seen of a rollout on its way: what has become of each candidate, and when. It knows of no viewer.

Invariant: a row can be made at any time; that of a group that is over stays as it is, but for rewards that come.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from vllm_rollout.group.types import Ending
from vllm_rollout.rewards.values import Grade
from vllm_rollout.server.engine import CandidateEnd
from vllm_rollout.trace.rows import End, GroupFate, RolloutPrompt, RolloutState, end_of

MAX_MOVES = 16
"""How many moves of a group are told, with where it began: later ones change its rank only."""


@dataclass(slots=True)
class SeenCandidate:
    num_tokens: int = 0
    end: End | Literal["running"] = "running"
    ended_s: float | None = None
    score: float | None = None
    reward: float | None = None
    reward_status: str | None = None


@dataclass(slots=True)
class SeenGroup:
    """The group of one prompt. Seconds are those since its rollout began."""

    rollout: SeenRollout
    position: int
    prompt_id: str
    prompt_tokens: int
    key: str
    """The prompt's name over all rollouts; empty: its id."""
    num_candidates: int
    """That it begins with."""
    audit: bool
    started_s: float
    ends: Mapping[int, CandidateEnd]
    """By index: those that have ended, with what they generated."""
    candidates: dict[int, SeenCandidate] = field(default_factory=dict)
    rank: int | None = None
    moves: list[tuple[float, int]] = field(default_factory=list)
    fate: GroupFate = "running"
    reason: str | None = None
    """Why it is not complete."""
    over_s: float | None = None
    selected: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.begin_again()

    def begin_again(self) -> None:
        """At first, and when its rank died."""
        self.candidates = {index: SeenCandidate() for index in range(self.num_candidates)}
        self._changed()

    def candidate_ended(self, end: CandidateEnd) -> None:
        ending: Ending = end.ending
        seen = self.candidates.setdefault(ending.index, SeenCandidate())
        seen.num_tokens, seen.end, seen.ended_s = ending.num_tokens, end_of(ending), self.rollout.now()
        seen.score = None if end.assessment is None else end.assessment.score
        self._changed()

    def graded(self, index: int, grade: Grade) -> None:
        self.candidates[index].reward, self.candidates[index].reward_status = grade.reward, grade.status
        self._changed()

    def runs(self, rank: int, num_tokens: Sequence[int]) -> None:
        """So many tokens have those that run, in the order of their indices."""
        if rank != self.rank:
            if self.rank is not None and len(self.moves) < MAX_MOVES:
                first = [] if self.moves else [(self.started_s, self.rank)]
                self.moves += [*first, (self.rollout.now(), rank)]
            self.rank = rank
        running = (seen for _, seen in sorted(self.candidates.items()) if seen.end == "running")
        for seen, num in zip(running, num_tokens, strict=False):  # one may have ended since
            seen.num_tokens = num
        self._changed()

    def over(self, fate: GroupFate, reason: str | None, selected: Sequence[int]) -> None:
        self.fate, self.reason, self.selected, self.over_s = fate, reason, selected, self.rollout.now()
        self._changed()

    def row(self) -> RolloutPrompt:
        each = [self.candidates[index] for index in sorted(self.candidates)]
        scored, graded = any(c.score is not None for c in each), any(c.reward_status for c in each)
        rewarded = graded or any(c.reward is not None for c in each)
        return RolloutPrompt.model_construct(
            id=self.prompt_id,
            position=self.position,
            prompt_tokens=self.prompt_tokens,
            key=self.key,
            rank=self.rank,
            moves=self.moves or None,
            status=self.fate,
            reason=self.reason,
            audit=self.audit,
            started_s=self.started_s,
            over_s=self.over_s,
            lengths=[c.num_tokens for c in each],
            ends=cast("list[End]", [c.end for c in each]),  # one that runs is in no file
            ended_s=[c.ended_s for c in each],
            selected=list(self.selected),
            scores=[c.score for c in each] if scored else None,
            rewards=[c.reward for c in each] if rewarded else None,
            reward_status=[c.reward_status for c in each] if graded else None,
        )

    def rewarded(self, index: int, reward: float) -> None:
        """A trainer has posted it."""
        if index in self.candidates:
            self.candidates[index].reward = reward
            self._changed()

    def _changed(self) -> None:
        self.rollout.changed.add(self.position)


@dataclass(slots=True)
class SeenRollout:
    """A rollout and its groups that have begun."""

    began: float = field(default_factory=time.time)
    """Unix seconds."""
    began_s: float = field(default_factory=time.monotonic)
    groups: dict[int, SeenGroup] = field(default_factory=dict)
    """By position."""
    changed: set[int] = field(default_factory=set)
    """Positions of groups of which nobody was told since."""
    run: str | None = None
    round: int | None = None
    kind: Literal["short", "long"] | None = None
    state: RolloutState = "running"
    seconds: float | None = None

    def now(self) -> float:
        """Seconds since it began, to the millisecond."""
        return round(time.monotonic() - self.began_s, 3)

    def begin(self) -> None:
        """It was prepared before."""
        self.began, self.began_s = time.time(), time.monotonic()

    def over(self, *, left: bool) -> None:
        self.state, self.seconds = "left" if left else "over", self.now()

    def rewarded(self, rewards: Iterable[tuple[str, int, float]]) -> None:
        """(prompt id, index, reward) each, of candidates that have ended, before the rollout is over."""
        by_id = {group.prompt_id: group for group in self.groups.values()}
        for prompt_id, index, reward in rewards:
            if prompt_id in by_id:
                by_id[prompt_id].rewarded(index, reward)

    def filtered(self, prompt_id: str) -> None:
        """Its round returns another group in its place."""
        for group in self.groups.values():
            if group.prompt_id == prompt_id:
                group.over("filtered", None, ())

    def rows(self, *, running: bool = True) -> list[RolloutPrompt]:
        """In the order of the prompts; those of groups that still run only if `running`."""
        groups = [self.groups[position] for position in sorted(self.groups)]
        return [group.row() for group in groups if running or group.over_s is not None]

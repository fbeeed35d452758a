"""A rollout that is shown and recorded: the state of each candidate over time. This module knows no viewers.

Invariant: a row can be made at any time. The row of a finished group changes only when rewards come.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from vllm_rollout.kernel.http.engine import CandidateEnd
from vllm_rollout.kernel.http.plan_port import GroupRecord
from vllm_rollout.kernel.http.rollout import Rollout
from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.kernel.rules.types import Ending
from vllm_rollout.parts.page.recording.rows import GroupFate, RolloutPrompt, RolloutRow, RolloutState
from vllm_rollout.parts.shaping.rules.trace import End, end_of

MAX_MOVES = 16
"""Most moves of a group that are recorded, besides its first rank. Later moves only change its rank."""


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
    """Observations of the group of one prompt. All times are seconds since its rollout began."""

    rollout: WatchedRollout
    record: GroupRecord
    key: str
    """The prompt's name across rollouts. Empty if that is its id."""
    candidates: dict[int, SeenCandidate] = field(default_factory=dict)
    rank: int | None = None
    moves: list[tuple[float, int]] = field(default_factory=list)
    fate: GroupFate = "running"
    reason: str | None = None
    """Reason why the group is not complete."""
    over_s: float | None = None
    selected: Sequence[int] = ()
    prompt_text: str | None = None
    """Text of the prompt, made when somebody looks."""
    texts: dict[int, tuple[CandidateEnd, str]] = field(default_factory=dict)
    """Ends and texts of ended candidates at which somebody looked, by index."""

    def __post_init__(self) -> None:
        self.begin_again()

    def begin_again(self) -> None:
        """Set all candidates to running, at the start and after the group's rank died."""
        self.candidates = {index: SeenCandidate() for index in range(self.record.plan.num_candidates)}
        self.texts = {}
        self._changed()

    def candidate_ended(self, end: CandidateEnd) -> None:
        ending: Ending = end.ending
        seen = self.candidates.setdefault(ending.index, SeenCandidate())
        seen.num_tokens, seen.end, seen.ended_s = ending.num_tokens, end_of(ending), self.rollout.now()
        seen.score = self.record.fields_of(end).get("score")
        self._changed()

    def graded(self, index: int, grade: Grade) -> None:
        self.candidates[index].reward, self.candidates[index].reward_status = grade.reward, grade.status
        self._changed()

    def runs(self, rank: int, num_tokens: Sequence[int]) -> None:
        """Record the rank of the group, and the tokens of its running candidates in the order of their indices."""
        if rank != self.rank:
            if self.rank is not None and len(self.moves) < MAX_MOVES:
                first = [] if self.moves else [(self.record.started_s, self.rank)]
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
        record, each = self.record, [self.candidates[index] for index in sorted(self.candidates)]
        scored, graded = any(c.score is not None for c in each), any(c.reward_status for c in each)
        rewarded = graded or any(c.reward is not None for c in each)
        return RolloutPrompt.model_construct(
            id=record.prompt.id,
            position=record.position,
            prompt_tokens=len(record.prompt.token_ids),
            key=self.key,
            rank=self.rank,
            moves=self.moves or None,
            status=self.fate,
            reason=self.reason,
            audit=record.plan.audit,
            started_s=record.started_s,
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
        """Record a reward that a trainer has posted."""
        if index in self.candidates:
            self.candidates[index].reward = reward
            self._changed()

    def _changed(self) -> None:
        self.rollout.changed.add(self.record.position)


@dataclass(slots=True)
class WatchedRollout:
    """A rollout, and what was observed of it and of its started groups."""

    rollout: Rollout
    began: float = field(default_factory=time.time)
    """Start of the rollout in Unix seconds."""
    began_s: float = field(default_factory=time.monotonic)
    groups: dict[int, SeenGroup] = field(default_factory=dict)
    """Groups by position."""
    changed: set[int] = field(default_factory=set)
    """Positions of groups with changes that were not sent to viewers yet."""
    state: RolloutState = "running"
    seconds: float | None = None

    def now(self) -> float:
        """Seconds since the rollout began, rounded to milliseconds."""
        return round(time.monotonic() - self.began_s, 3)

    def begin(self) -> None:
        """Start the rollout's clock, which began at its preparation, anew."""
        self.began, self.began_s = time.time(), time.monotonic()

    def over(self, *, left: bool) -> None:
        self.state, self.seconds = "left" if left else "over", self.now()

    def rewarded(self, rewards: Iterable[tuple[str, int, float]]) -> None:
        """Record rewards of ended candidates before the rollout is over. Each is (prompt id, index, reward)."""
        by_id = {group.record.prompt.id: group for group in self.groups.values()}
        for prompt_id, index, reward in rewards:
            if prompt_id in by_id:
                by_id[prompt_id].rewarded(index, reward)

    def filtered(self, prompt_id: str) -> None:
        """Record that the round filtered this prompt's group out."""
        for group in self.groups.values():
            if group.record.prompt.id == prompt_id:
                group.over("filtered", None, ())

    def row(self, *, with_prompts: bool = True, running: bool = False) -> RolloutRow:
        """The rollout as a row of a trace. `running`: include groups that are not over."""
        rollout, plan = self.rollout, self.rollout.plans[0].group
        caps = [prompt.max_tokens for prompt in rollout.prompts if prompt.max_tokens is not None]
        return RolloutRow.model_construct(
            rollout_id=rollout.id,
            model=rollout.model,
            group_size=plan.group_size,
            max_tokens=max(caps, default=None),
            detection_length=None if plan.pruning is None else plan.pruning.detection_length,
            began=self.began,
            seconds=self.seconds,
            num_prompts=len(rollout.prompts),
            num_candidates=rollout.num_responses,
            **{name: rollout.labels.get(name) for name in ("run", "round", "kind")},
            state=self.state,
            receipt=rollout.receipt,
            weight_versions=sorted(rollout.outcome.versions) or None,
            prompts=self.rows(running=running) if with_prompts else [],
        )

    def rows(self, *, running: bool = True) -> list[RolloutPrompt]:
        """Rows of the groups, in the order of the prompts. `running`: include groups that still run."""
        groups = [self.groups[position] for position in sorted(self.groups)]
        return [group.row() for group in groups if running or group.over_s is not None]

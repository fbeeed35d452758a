"""One round on its way: which prompts to start, when it is complete, what becomes of each.

Invariant: at most `num_wanted` prompts are returned, and each entry gets exactly one fate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from vllm_rollout.group.rounds.rounds import EntryOutcome, Fate, OpenRound

DeferReason = Literal["cut", "tie", "incomplete"]
"""Why a prompt was deferred: enough others were complete, it completed too late to count, its candidates were lost."""


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """How the group of a prompt ended, as the round sees it."""

    complete: bool
    """It has its trajectories."""
    deferred: bool
    """It was stopped, or lost a tie."""
    max_tokens: int
    """Tokens of its longest trajectory; 0 without any."""


@dataclass(slots=True)
class RoundProgress:
    """Positions are those of `OpenRound.all_entries`."""

    opened: OpenRound
    filters: bool = False
    """Groups without variance are taken out and replaced: the round waits for the rewards of its groups."""
    fates: dict[int, Fate] = field(default_factory=dict)
    """So far; a returned one may still be filtered."""
    reasons: dict[int, DeferReason] = field(default_factory=dict)
    _max_tokens: dict[int, int] = field(default_factory=dict)
    _to_start: list[int] = field(init=False)
    _spare: list[int] = field(init=False)
    _running: set[int] = field(default_factory=set)
    _unrewarded: set[int] = field(default_factory=set)
    num_filtered: int = 0
    num_complete: int = 0
    """Groups that ended complete, filtered ones too: what a race counts."""

    def __post_init__(self) -> None:
        num = len(self.opened.entries)
        self._to_start = list(range(num))[::-1]
        self._spare = list(range(num, num + len(self.opened.reserve)))[::-1]

    def start_in(self, positions: Iterable[int]) -> None:
        """Before any prompt starts: they start in this order. Reserves, which it may name, follow in their own."""
        self._to_start = [position for position in positions if position < len(self.opened.entries)][::-1]

    @property
    def num_wanted(self) -> int:
        """Groups that have to complete: each filtered one needs another."""
        return self.opened.num_wanted + self.num_filtered

    @property
    def is_cut(self) -> bool:
        """Enough groups are complete: nothing else starts, unless rewards say otherwise."""
        return self.num_complete >= self.num_wanted

    @property
    def is_over(self) -> bool:
        """Nothing runs, nothing is to start, and no reward is awaited that could change that."""
        return not (self._running or self._unrewarded) and self._next() is None

    def start(self) -> int | None:
        """The next prompt to start, which counts as running; None: not now."""
        position = self._next()
        if position is None:
            return None
        (self._to_start or self._spare).pop()
        self._running.add(position)
        return position

    def withdraw(self, position: int) -> None:
        """It was to start, and no candidate of it has run: the round was cut meanwhile."""
        self._running.discard(position)
        (self._to_start if position < len(self.opened.entries) else self._spare).append(position)

    def group_over(self, position: int, end: GroupEnd) -> Fate:
        """A group ended. In a long round it is returned whatever it is."""
        self._running.discard(position)
        fate: Fate = "returned"
        if self.opened.kind == "short" and (end.deferred or not end.complete or self.is_cut):
            fate = "deferred"
            self.reasons[position] = "tie" if end.complete else "cut" if end.deferred else "incomplete"
        self.fates[position] = fate
        if fate == "returned":
            self.num_complete += 1
            self._max_tokens[position] = end.max_tokens
            if self.filters and end.complete:
                self._unrewarded.add(position)
        return fate

    def ended_before(self, position: int, end: GroupEnd) -> Fate:
        """A group that did not start: it had ended before the round was interrupted."""
        (self._to_start if position < len(self.opened.entries) else self._spare).remove(position)
        return self.group_over(position, end)

    def lost_before(self) -> list[int]:
        """Entries whose race was over before the round was interrupted: those that had ended then were enough."""
        if not self.is_cut:
            return []
        lost, self._to_start = self._to_start[::-1], []
        for position in lost:
            self.fates[position], self.reasons[position] = "deferred", "cut"
        return lost

    def rewarded(self, position: int, rewards: Collection[float]) -> bool:
        """These are all the rewards that trajectories of a returned group have; whether it is filtered by them.

        One alone, where the others' grader failed, says nothing of how they differ.
        """
        if position not in self._unrewarded:
            return False
        self._unrewarded.discard(position)
        if len(rewards) < 2 or len(set(rewards)) > 1:
            return False
        self.fates[position] = "filtered"
        self.num_filtered += 1
        return True

    def outcomes(self) -> dict[int, EntryOutcome]:
        """What became of each entry of a round that is over, by entry number."""
        return {
            entry.number: EntryOutcome(self.fates.get(position, "unstarted"), self._max_tokens.get(position, 0))
            for position, entry in enumerate(self.opened.all_entries)
        }

    def _next(self) -> int | None:
        if self._to_start:
            return None if self.is_cut else self._to_start[-1]
        # One reserve for each filtered prompt, and none in place of a prompt that still runs.
        num_reserves_started = len(self.opened.reserve) - len(self._spare)
        if self._spare and num_reserves_started < self.num_filtered and not self.is_cut:
            return self._spare[-1]
        return None

"""State of one running round: the prompts to start, the end of the round, and the outcome of each prompt.

Invariant: at most `num_wanted` prompts are returned, and each entry gets exactly one outcome.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from vllm_rollout.parts.rounds.rules.rounds import EntryOutcome, Fate, OpenRound

DeferReason = Literal["cut", "tie", "incomplete"]
"""Reason why a prompt was deferred: enough others were complete, it completed too late to count, or candidates were
lost."""


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """The end of a prompt's group, as the round needs it."""

    complete: bool
    """True if the group has its trajectories."""
    deferred: bool
    """True if the group was stopped, or lost a tie."""
    max_tokens: int
    """Tokens of the group's longest trajectory. 0 without any."""


@dataclass(slots=True)
class RoundProgress:
    """Progress of an open round. Positions are those of `OpenRound.all_entries`."""

    opened: OpenRound
    filters: bool = False
    """True if groups without variance are replaced by others. Then the round waits for the rewards of its groups."""
    fates: dict[int, Fate] = field(default_factory=dict)
    """Outcomes so far, by position. A returned prompt may still be filtered."""
    reasons: dict[int, DeferReason] = field(default_factory=dict)
    _max_tokens: dict[int, int] = field(default_factory=dict)
    _to_start: list[int] = field(init=False)
    _spare: list[int] = field(init=False)
    _running: set[int] = field(default_factory=set)
    _unrewarded: set[int] = field(default_factory=set)
    num_filtered: int = 0
    num_complete: int = 0
    """Number of groups that ended complete, filtered ones included, as a race counts them."""

    def __post_init__(self) -> None:
        num = len(self.opened.entries)
        self._to_start = list(range(num))[::-1]
        self._spare = list(range(num, num + len(self.opened.reserve)))[::-1]

    def start_in(self, positions: Iterable[int]) -> None:
        """Set the order in which prompts start, before any starts. Reserves are ignored here: they start last, in
        order."""
        self._to_start = [position for position in positions if position < len(self.opened.entries)][::-1]

    @property
    def num_wanted(self) -> int:
        """Complete groups that end the round: each filtered group requires another one."""
        return self.opened.num_wanted + self.num_filtered

    @property
    def is_cut(self) -> bool:
        """True if enough groups are complete. No prompt starts then, unless a later reward filters a group."""
        return self.num_complete >= self.num_wanted

    @property
    def is_over(self) -> bool:
        """True if no group runs, none is to start, and no reward is awaited that could start another."""
        return not (self._running or self._unrewarded) and self._next() is None

    def start(self) -> int | None:
        """Start the next prompt, and return its position. None: no prompt may start now."""
        position = self._next()
        if position is None:
            return None
        (self._to_start or self._spare).pop()
        self._running.add(position)
        return position

    def withdraw(self, position: int) -> None:
        """Put back a prompt that was to start. No candidate of it has run, since the round was cut meanwhile."""
        self._running.discard(position)
        (self._to_start if position < len(self.opened.entries) else self._spare).append(position)

    def group_over(self, position: int, end: GroupEnd) -> Fate:
        """Record the end of a group. In a long round the group is returned in any case."""
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
        """Record a group that had ended before the round was interrupted, so that it does not start."""
        (self._to_start if position < len(self.opened.entries) else self._spare).remove(position)
        return self.group_over(position, end)

    def lost_before(self) -> list[int]:
        """Defer entries whose race was over before the round was interrupted, and return their positions."""
        if not self.is_cut:
            return []
        lost, self._to_start = self._to_start[::-1], []
        for position in lost:
            self.fates[position], self.reasons[position] = "deferred", "cut"
        return lost

    def rewarded(self, position: int, rewards: Collection[float]) -> bool:
        """Record all rewards of a returned group. Returns True if the group is filtered.

        A single reward, if the grader failed for the others, does not filter: variance is then unknown.
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
        """Outcomes of all entries of a round that is over, by entry number."""
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

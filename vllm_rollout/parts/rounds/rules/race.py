"""Races between groups: a round is complete when enough of its groups are complete.

Invariant: of one engine's groups exactly `num_wanted` complete ones win. The others are deferred, in the step in which
the last winner completes.

Source: RollPacker section 3 (speculative execution for prompts).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_rollout.kernel.rules.lifecycle import Group

MAX_RACES = 1024
"""Races that an engine remembers. Beyond this number, the oldest is forgotten, as if it were over."""


@dataclass(frozen=True, slots=True)
class RacePlace:
    """The race of a group and its position there."""

    race_id: str
    num_wanted: int
    """Complete groups that end the race."""
    position: int
    """Position of the group in the race. Ties go to the lower position."""


class _Racer(NamedTuple):
    """A group in a race, with its position."""

    group: Group
    position: int


@dataclass(slots=True)
class _Race:
    """The groups of one round in one engine."""

    num_wanted: int
    racers: dict[str, _Racer] = field(default_factory=dict)
    """Groups that are neither complete nor over, by group id."""
    num_complete: int = 0
    is_cut_elsewhere: bool = False
    """True if enough groups of all engines together are complete."""

    @property
    def is_cut(self) -> bool:
        """True if enough groups are complete."""
        return self.is_cut_elsewhere or self.num_complete >= self.num_wanted

    def settle(self, group_ids: Iterable[str]) -> tuple[str, ...]:
        """Close the step for groups with an event: count the complete ones, and forget those that are over.

        Several groups may complete in one step. The winners are those with the shortest longest trajectory, then those
        with the lower position. Returns the others, which have lost a tie.
        """
        groups = {group_id: self.racers[group_id].group for group_id in group_ids}
        ended = {id: self.racers.pop(id) for id, group in groups.items() if group.complete or group.over}
        complete = [id for id, racer in ended.items() if racer.group.complete]
        complete.sort(key=lambda id: (ended[id].group.longest, ended[id].position))
        num_winners = max(0, self.num_wanted - self.num_complete)
        self.num_complete += len(complete[:num_winners])
        return tuple(complete[num_winners:])


class RaceTable:
    """All races of one engine, by id."""

    def __init__(self) -> None:
        self._races: OrderedDict[str, _Race] = OrderedDict()
        self._race_of: dict[str, str] = {}
        """Race id by group id, for groups that take part in a race."""

    def __len__(self) -> int:
        return len(self._races)

    def enter(self, group_id: str, group: Group, place: RacePlace) -> bool:
        """Add a group to its race, if it is not there yet. Returns True if the race is over for it: it comes too
        late."""
        race = self._open(place.race_id, place.num_wanted)
        if group_id not in self._race_of:
            if group.complete:  # a late sibling, which its group stops by itself: the group was counted and has left
                return False
            self._race_of[group_id] = place.race_id
            race.racers[group_id] = _Racer(group, place.position)
        return race.is_cut

    def leave(self, group_id: str) -> RacePlace | None:
        """Remove a group that moves to another engine. Returns its place, or None if it is in no race."""
        race_id = self._race_of.pop(group_id, None)
        if race_id is None:
            return None
        race = self._races[race_id]
        return RacePlace(race_id, race.num_wanted, race.racers.pop(group_id).position)

    def settle(self, touched: Iterable[str]) -> tuple[set[str], list[str]]:
        """Close the step for groups with an event. Returns (groups that lost a tie, groups to cancel)."""
        by_race: dict[str, list[str]] = {}
        for group_id in touched:
            race_id = self._race_of.get(group_id)
            if race_id is not None:
                by_race.setdefault(race_id, []).append(group_id)
        lost: set[str] = set()
        cancelled: list[str] = []
        for race_id, group_ids in by_race.items():
            race = self._races[race_id]
            lost.update(race.settle(group_ids))
            if race.is_cut:
                cancelled += race.racers
                group_ids += race.racers
                race.racers.clear()
            for group_id in group_ids:
                if group_id not in race.racers:
                    self._race_of.pop(group_id, None)
        return lost, cancelled

    def widen(self, race_id: str, num_wanted: int) -> None:
        """Set the number of complete groups that the race needs, after winners were filtered. Cut groups stay cut."""
        race = self._open(race_id, num_wanted)
        race.num_wanted, race.is_cut_elsewhere = num_wanted, False

    def cut(self, race_id: str) -> list[str]:
        """End a race, because enough groups are complete in all engines. Returns the groups that still race.

        Groups that enter later come too late, unless `widen` is called.
        """
        race = self._open(race_id, 0)
        race.is_cut_elsewhere = True
        return list(race.racers)

    def forget(self, race_id: str) -> None:
        """Forget a race whose round is over. Groups that still run go on as groups of their own."""
        race = self._races.pop(race_id, None)
        if race is not None:
            for group_id in race.racers:
                del self._race_of[group_id]

    def _open(self, race_id: str, num_wanted: int) -> _Race:
        """The race with this id, created on the first use: `num_wanted` may arrive before the first group."""
        race = self._races.get(race_id)
        if race is None:
            race = self._races[race_id] = _Race(num_wanted)
            if len(self._races) > MAX_RACES:
                self.forget(next(iter(self._races)))
        return race

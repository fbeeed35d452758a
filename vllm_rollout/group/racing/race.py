"""Groups that race each other: a round is complete when the first so many of its groups are.

Invariant: of one engine's groups exactly `num_wanted` complete ones win; the others are deferred, in the step in which
the last winner completes.

Source: RollPacker section 3 (speculative execution for prompts).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_rollout.group.racing.lifecycle import Group

MAX_RACES = 1024
"""Races that an engine remembers; of more than these the oldest is forgotten, as if it were over."""


@dataclass(frozen=True, slots=True)
class RacePlace:
    """Where a group takes part."""

    race_id: str
    num_wanted: int | None
    """Complete groups that end the race. None: only the API process knows which are, and cuts it."""
    position: int
    """The group's place in the race: ties go to the lower one."""


class _Racer(NamedTuple):
    """A group that races others."""

    group: Group
    position: int


@dataclass(slots=True)
class _Race:
    """The groups of one round in one engine."""

    num_wanted: int | None
    racers: dict[str, _Racer] = field(default_factory=dict)
    """Those that have not completed and are not over, by group id."""
    num_complete: int = 0
    is_cut_elsewhere: bool = False
    """Enough groups are complete, of all engines'."""

    @property
    def is_cut(self) -> bool:
        """Enough groups are complete."""
        return self.is_cut_elsewhere or (self.num_wanted is not None and self.num_complete >= self.num_wanted)

    def settle(self, group_ids: Iterable[str]) -> tuple[str, ...]:
        """Close the step for groups that saw an event: count those that completed, forget those that are over.

        Several may complete in one step. The winners among them are those whose longest trajectory is the shortest,
        then those of the lower position; the others have lost a tie, and are returned.
        """
        groups = {group_id: self.racers[group_id].group for group_id in group_ids}
        if self.num_wanted is None:
            for id in (id for id, group in groups.items() if group.over):
                del self.racers[id]
            return ()
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
        """Group id -> race id, of groups that take part."""

    def __len__(self) -> int:
        return len(self._races)

    def enter(self, group_id: str, group: Group, place: RacePlace) -> bool:
        """A group takes part, if it does not already; whether the race is cut: the group comes too late."""
        race = self._open(place.race_id, place.num_wanted)
        if group_id not in self._race_of:
            if group.complete:  # a late sibling, which its group stops by itself: the group was counted and has left
                return False
            self._race_of[group_id] = place.race_id
            race.racers[group_id] = _Racer(group, place.position)
        return race.is_cut

    def leave(self, group_id: str) -> RacePlace | None:
        """A group goes on in another engine, with its place; None when it takes no part in a race."""
        race_id = self._race_of.pop(group_id, None)
        if race_id is None:
            return None
        race = self._races[race_id]
        return RacePlace(race_id, race.num_wanted, race.racers.pop(group_id).position)

    def settle(self, touched: Iterable[str]) -> tuple[set[str], list[str]]:
        """Close the step for groups that saw an event; (groups that lost a tie, groups to cancel)."""
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

    def widen(self, race_id: str, num_wanted: int | None) -> None:
        """Winners were taken out: so many groups have to complete now. Groups that were cut stay so."""
        race = self._open(race_id, num_wanted)
        race.num_wanted, race.is_cut_elsewhere = num_wanted, False

    def cut(self, race_id: str) -> list[str]:
        """Enough groups are complete here and elsewhere, unless the race is made wider. Returns those that still race;
        what enters from now on comes too late."""
        race = self._open(race_id, 0)
        race.is_cut_elsewhere = True
        return list(race.racers)

    def forget(self, race_id: str) -> None:
        """The round is over: nobody enters it again. Groups that still run go on as groups of their own."""
        race = self._races.pop(race_id, None)
        if race is not None:
            for group_id in race.racers:
                del self._race_of[group_id]

    def _open(self, race_id: str, num_wanted: int | None) -> _Race:
        """The race of that id. What is said of one that no group has entered yet holds for those on their way."""
        race = self._races.get(race_id)
        if race is None:
            race = self._races[race_id] = _Race(num_wanted)
            if len(self._races) > MAX_RACES:
                self.forget(next(iter(self._races)))
        return race

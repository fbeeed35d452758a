"""Decides when a group may start: as soon as its candidates will run soon, and not before.

A prompt that waits here costs nothing in the engine.

Invariant: groups with a lower priority number start first. Groups of one asker start in the order of their requests.
A source of many groups has one turn in the line, as a rollout has that asks for one group at a time. Admitted
candidates never exceed the places, unless a single group is larger than all places.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple


def num_launch_places(max_num_seqs: int, num_ranks: int, num_api_processes: int) -> int:
    """Candidates that one of the API processes may have in its engines at once.

    This is the number that all ranks run, because all rollouts may belong to one process, plus waiting candidates. The
    waiting ones, a share of the same number, keep steps full: an ending reaches this process one message late.
    """
    num_running = max_num_seqs * num_ranks
    return num_running + -(-num_running // num_api_processes)


class Asker(NamedTuple):
    """Asks for places of a group."""

    priority: int = 0
    """Lower numbers start first, as in vLLM."""
    source: object = None
    """Asks for many groups at once, and takes turns with others. None: asks for one group at a time."""


ALONE = Asker()


@dataclass(slots=True, eq=False)
class Turn:
    """A group's request for places."""

    num_candidates: int
    asker: Asker
    admitted: bool = False


class LaunchWindow:
    """Places for candidates."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.num_taken = 0
        self._line: list[Turn] = []
        self._behind: dict[Asker, deque[Turn]] = {}
        """Later turns of each source that has a turn in the line."""

    @property
    def num_waiting(self) -> int:
        """Number of groups that wait for admission."""
        return len(self._line) + sum(map(len, self._behind.values()))

    def ask(self, num_candidates: int, asker: Asker = ALONE) -> Turn:
        turn = Turn(num_candidates, asker)
        if (behind := self._behind.get(asker)) is not None:
            behind.append(turn)
        else:
            if asker.source is not None:
                self._behind[asker] = deque()
            self._join(turn)
        return turn

    def withdraw(self, turn: Turn) -> None:
        """Withdraw a group that will not start. If it was admitted, its places become free."""
        if turn.admitted:
            self.release(turn.num_candidates)
        elif turn not in self._line:
            self._behind[turn.asker].remove(turn)
        else:
            place = self._line.index(turn)
            self._line[place : place + 1] = self._next(turn.asker)

    def release(self, num_candidates: int) -> None:
        """Free the places of candidates that have ended."""
        self.num_taken -= num_candidates

    def admit(self) -> list[Turn]:
        """Admit the groups that may start now. A small group does not overtake a large group that waits before it."""
        admitted = []
        while self._line and self._has_room(self._line[0].num_candidates):
            turn = self._line.pop(0)
            for later in self._next(turn.asker):
                self._join(later)
            turn.admitted = True
            self.num_taken += turn.num_candidates
            admitted.append(turn)
        return admitted

    def _has_room(self, num_candidates: int) -> bool:
        return self.num_taken == 0 or self.num_taken + num_candidates <= self.num_places

    def _join(self, turn: Turn) -> None:
        insort(self._line, turn, key=lambda other: other.asker.priority)

    def _next(self, asker: Asker) -> list[Turn]:
        """The next turn of a source, if there is one."""
        if behind := self._behind.get(asker):
            return [behind.popleft()]
        self._behind.pop(asker, None)
        return []

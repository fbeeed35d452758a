"""When a group may start: as soon as its candidates will run soon, and not before.

A prompt that waits here costs nothing in the engine. Invariant: groups of one priority start in the order in which they
asked, and those of a lower number before all others; no more candidates have places than there are, except for a group
that is larger than all of them.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass


def num_launch_places(max_num_seqs: int, num_ranks: int, num_api_processes: int) -> int:
    """Candidates that one of the API processes may have in its engines at once.

    As many as all ranks run, because its rollouts may be the only ones, and a share of as many that wait there, so that
    a step never lacks one: an ending is seen here a message later than in the engine.
    """
    num_running = max_num_seqs * num_ranks
    return num_running + -(-num_running // num_api_processes)


@dataclass(slots=True, eq=False)
class Turn:
    """A group that asks to start."""

    num_candidates: int
    priority: int = 0
    """As vLLM has it: a lower number is earlier."""
    admitted: bool = False


class LaunchWindow:
    """Places for candidates. A rollout that asks for one group at a time takes turns with the others."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.num_taken = 0
        self._waiting: list[Turn] = []

    @property
    def num_waiting(self) -> int:
        """Groups that have asked and not been admitted."""
        return len(self._waiting)

    def ask(self, num_candidates: int, priority: int = 0) -> Turn:
        turn = Turn(num_candidates, priority)
        insort(self._waiting, turn, key=lambda other: other.priority)
        return turn

    def withdraw(self, turn: Turn) -> None:
        """The group will not start. One that was admitted gives its places back."""
        if turn.admitted:
            self.release(turn.num_candidates)
        else:
            self._waiting.remove(turn)

    def release(self, num_candidates: int) -> None:
        """So many admitted candidates are over."""
        self.num_taken -= num_candidates

    def admit(self) -> list[Turn]:
        """The groups that may start now. Size overtakes nobody: a small group behind a large one waits as that does."""
        admitted = []
        while self._waiting and self._has_room(self._waiting[0].num_candidates):
            turn = self._waiting.pop(0)
            turn.admitted = True
            self.num_taken += turn.num_candidates
            admitted.append(turn)
        return admitted

    def _has_room(self, num_candidates: int) -> bool:
        return self.num_taken == 0 or self.num_taken + num_candidates <= self.num_places

"""Finds the group of a request that states its group's size but no name: siblings are requests of one prompt.

A request joins the open group of its key, or opens the next one. A group closes when all its candidates have come, or
when all that came have ended. Later requests open another group. If a prompt comes again in a later batch, or twice in
one batch, the verdicts of the earlier group do not apply. A sibling that comes too late runs to its end.

Invariant: at most `num_candidates` requests join a group. Each of them is the first, or joins while another one runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vllm_rollout.kernel.rules.plan import GroupJoin


@dataclass(slots=True, eq=False)
class _Open:
    key: Hashable
    num_to_come: int
    num_running: int = 0


class PromptGroups:
    """The groups of one process by number. Groups that are over are forgotten."""

    def __init__(self) -> None:
        self._open: dict[Hashable, int] = {}
        """Number of the open group by key."""
        self._groups: dict[int, _Open] = {}
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._groups)

    @contextmanager
    def named(self, join: GroupJoin, *key: Hashable) -> Iterator[str | int]:
        """Yield the group of a request for as long as the request runs.

        The group is the name that `join` states, or else the number of the open group of `key`.
        """
        if join.name is not None:
            yield join.name
            return
        number = self.join((join, *key), join.num_candidates)
        try:
            yield number
        finally:
            self.leave(number)

    def join(self, key: Hashable, num_candidates: int) -> int:
        """Register a request of this prompt and these terms, and return the number of its group. Call `leave` at its
        end."""
        number = self._open.get(key)
        if number is None:
            number = self._open[key] = self._num_opened
            self._num_opened += 1
            self._groups[number] = _Open(key, num_candidates)
        group = self._groups[number]
        group.num_running += 1
        group.num_to_come -= 1
        if group.num_to_come == 0:
            del self._open[key]
        return number

    def leave(self, number: int) -> None:
        """Register the end of a request that joined, after success or failure."""
        group = self._groups[number]
        group.num_running -= 1
        if group.num_running == 0:
            del self._groups[number]
            if self._open.get(group.key) == number:
                del self._open[group.key]

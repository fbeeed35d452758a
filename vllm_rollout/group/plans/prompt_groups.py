"""Which group a request joins that says how large its group is, and not which one: siblings are requests of one prompt.

A request joins the group that is open under its key, or opens the next one. A group is closed to newcomers when all its
candidates have come, or when all that came have ended: what comes later begins another one. So the same prompt in a
later batch, or twice in one, never meets verdicts of the batch before, and a sibling that comes too late runs to its
end.

Invariant: at most `num_candidates` requests join a group, each while another of them is on its way or as the first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vllm_rollout.group.plans.plan import GroupJoin


@dataclass(slots=True, eq=False)
class _Open:
    key: Hashable
    num_to_come: int
    num_running: int = 0


class PromptGroups:
    """The groups of one process, by number. What is over is forgotten."""

    def __init__(self) -> None:
        self._open: dict[Hashable, int] = {}
        """The group that newcomers join, by key."""
        self._groups: dict[int, _Open] = {}
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._groups)

    @contextmanager
    def named(self, join: GroupJoin, *key: Hashable) -> Iterator[str | int]:
        """The name of a request's group as long as it is on its way: its own, or the number of the one that it joins
        by `key`."""
        if join.name is not None:
            yield join.name
            return
        number = self.join((join, *key), join.num_candidates)
        try:
            yield number
        finally:
            self.leave(number)

    def join(self, key: Hashable, num_candidates: int) -> int:
        """A request of this prompt, and of these terms, has come: the number of its group. Call `leave` at its end."""
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
        """A request that joined has ended, however it did."""
        group = self._groups[number]
        group.num_running -= 1
        if group.num_running == 0:
            del self._groups[number]
            if self._open.get(group.key) == number:
                del self._open[group.key]

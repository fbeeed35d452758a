"""Staleness of groups in a feed: which group may start, which groups make the next batch, and which are too old.

The version is the number of weights updates since the feed began. A group is born with the version at its start. Its
staleness is the version at which it is taken, minus the version at which it was born.

With `on_stale` "defer" batches are the rounds of RollPacker. Groups that become too old are stopped, so that no batch
waits for them. Once a batch of their prompts waits, these start together as long groups, for which batches do wait.

Invariant: a group is taken once. Unless `on_stale` is "finish", none is taken with more than `max_staleness`. If the
trainer takes a batch before each update, "wait" drops no group, and "defer" no long group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

OnStale = Literal["wait", "drop", "finish", "defer"]
OnUpdate = Literal["keep", "recompute", "stop"]
WaitsFor = Literal["groups", "older_groups", "prompts", "weights", "trainer", "harness", "fields"]
"""Reason why there is no batch. `groups`: more groups have to complete. `older_groups`: without older groups that run,
which would become too old, no batch is taken. `prompts`: nothing runs, and no prompt waits. `weights`: no group may
start before the next weights update. `trainer`: a batch is complete, and may be taken. `harness`: nobody runs the
sessions of a feed of sessions. `fields`: the server refuses the feed's fields."""
NUMBERED = re.compile(r"(.*?)(\d+)", re.DOTALL)
"""A version's name that ends with a number, as step-17."""
MAX_BYTES = 4 << 30
"""Most bytes of complete and of stopped groups, in all feeds of a server."""
MAX_NAMES = 4096
"""Names that a feed remembers of each kind: of versions, and keys of requests."""


@dataclass(frozen=True, slots=True)
class FeedTerms:
    batch: int
    """Groups of a batch (B)."""
    max_staleness: int
    """Bound of the staleness (eta)."""
    on_stale: OnStale = "wait"

    @property
    def num_places(self) -> int:
        """Most groups that run or are complete at a time."""
        return (self.max_staleness + 1) * self.batch


class TakenGroup(NamedTuple):
    number: int
    born: int
    staleness: int


@dataclass(slots=True)
class Feed:
    """The groups of one feed. Each has a number, in the order in which they start."""

    terms: FeedTerms
    version: int = 0
    """Number of weights updates since the feed began."""
    num_used: int = 0
    """Places of taken batches, and of versions under which no batch was taken."""
    running: dict[int, int] = field(default_factory=dict)
    """Version at birth of each running group."""
    complete: dict[int, int] = field(default_factory=dict)
    """Version at birth of each complete group."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of each complete group, and of each one that was stopped and goes on."""
    max_bytes: int = MAX_BYTES
    """Bytes of these groups from which on no group starts but those that the next batch lacks."""
    num_admitted: int = 0
    long: set[int] = field(default_factory=set)
    """Long groups that run or are complete."""

    @property
    def capacity(self) -> int:
        """Groups that may start now. Source: AReaL, 5.1."""
        most = (self.version + self.terms.max_staleness + 1) * self.terms.batch - self.num_used
        if self.is_full:
            most = min(most, self.terms.batch)
        return max(0, most - len(self.running) - len(self.complete))

    @property
    def num_bytes(self) -> int:
        """Bytes of complete and of stopped groups."""
        return sum(self.sizes.values())

    @property
    def is_full(self) -> bool:
        return self.num_bytes >= self.max_bytes

    def admit(self, *, is_long: bool = False) -> int:
        """Start a group. Returns its number."""
        assert self.capacity > 0, "the caller checks the capacity"
        number, self.num_admitted = self.num_admitted, self.num_admitted + 1
        self.running[number] = self.version
        if is_long:
            self.long.add(number)
        return number

    def num_long(self, num_deferred: int, num_prompts: int) -> int:
        """Deferred prompts that become long groups now: a batch of them, or the last ones. `num_prompts`: prompts that
        wait, without deferred ones.

        Source: RollPacker 3, and 6.7 for one step off.
        """
        is_rest = not num_prompts and not self.running and len(self.complete) < self.terms.batch
        return self.terms.batch if num_deferred >= self.terms.batch else num_deferred if is_rest else 0

    def completed(self, number: int, num_bytes: int = 0) -> None:
        self.complete[number], self.sizes[number] = self.running.pop(number), num_bytes

    def stopped(self, number: int, num_bytes: int) -> None:
        """A running group goes on later. `num_bytes`: of the output with which it does."""
        self.sizes[number] = num_bytes

    def gave_up(self, number: int) -> None:
        """Give back the place of a running group that was filtered, or that failed."""
        del self.running[number]
        self.sizes.pop(number, None)
        self.long.discard(number)

    def take(self, *, drain: bool = False) -> list[TakenGroup] | None:
        """The groups of the next batch, oldest first. None: wait.

        `drain`: no prompt waits, so once nothing runs the batch may be smaller, or empty.
        """
        oldest = self._oldest
        is_last = drain and not self.running
        if (len(oldest) < self.terms.batch and not is_last) or not self._may_take(oldest):
            return None
        if oldest:  # else no update follows
            self.num_used += self.terms.batch
        born = {number: self._pop_complete(number) for number in oldest}
        return [TakenGroup(number, at, self.version - at) for number, at in born.items()]

    def too_many(self, not_begun: Iterable[int]) -> list[int]:
        """Groups that give their places back, because the feed is full: the newest of those that have not begun."""
        spare = len(self.running) + len(self.complete) - self.terms.batch if self.is_full else 0
        return sorted(not_begun, reverse=True)[: max(0, spare)]

    def updated(self) -> list[int]:
        """The weights have changed. Returns the groups that have become too old. They are dropped."""
        self.version += 1
        self.num_used = max(self.num_used, self.version * self.terms.batch)
        running = [number for number, at in self.running.items() if self.is_too_old(at)]
        complete = [number for number, at in self.complete.items() if self.is_too_old(at)]
        for number in running:
            self.gave_up(number)
        for number in complete:
            self._pop_complete(number)
        return running + complete

    def is_too_old(self, born: int) -> bool:
        """True if no batch may have a group that was born at this version."""
        return self.terms.on_stale != "finish" and born < self.version - self.terms.max_staleness

    @property
    def is_ready(self) -> bool:
        """True if a whole batch may be taken."""
        return len(self.complete) >= self.terms.batch and self._may_take(self._oldest)

    def waits_for(self, num_prompts: int, num_stopped: int = 0) -> WaitsFor:
        """The reason why there is no batch. `num_prompts`: prompts that wait. `num_stopped`: running groups that wait
        to go on."""
        if self.is_ready:
            return "trainer"
        if len(self.running) > num_stopped:
            return "older_groups" if len(self.complete) >= self.terms.batch else "groups"
        return "weights" if num_prompts or num_stopped else "prompts"

    @property
    def _oldest(self) -> list[int]:
        """The complete groups of the next batch."""
        return sorted(self.complete)[: self.terms.batch]

    def _pop_complete(self, number: int) -> int:
        del self.sizes[number]
        self.long.discard(number)
        return self.complete.pop(number)

    def _may_take(self, oldest: Iterable[int]) -> bool:
        """True if the other groups can still be taken in time, or if waiting would bring no older group."""
        if self.terms.on_stale not in ("wait", "defer"):
            return True
        awaited = self.long if self.terms.on_stale == "defer" else {*self.running, *self.complete}
        taken = {number: self.complete[number] for number in oldest}
        running = [at for number, at in self.running.items() if number in awaited]
        if not taken or not running or min(running) >= max(taken.values()):
            return True
        left = [*running, *(at for number, at in self.complete.items() if number in awaited and number not in taken)]
        eta, batch = self.terms.max_staleness, self.terms.batch
        # a group that was born at version v must be in the batch of version v + eta, or in an earlier one
        return all(sum(at + eta <= self.version + more for at in left) <= more * batch for more in range(eta + 1))


class Newest:
    """The newest names, at most MAX_NAMES, each with a digest or without."""

    def __init__(self) -> None:
        self._names: dict[str, str | None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> str | None:
        return self._names[name]

    def add(self, name: str, digest: str | None = None) -> None:
        self._names[name] = digest
        if len(self._names) > MAX_NAMES:
            del self._names[next(iter(self._names))]


class Versions:
    """Names of the weights that a feed has known."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        """Name of the newest weights. None if they have none."""
        self._known = Newest()
        if name is not None:
            self._known.add(name)

    def differs(self, name: str | None) -> bool:
        """True if this name says that the weights have changed."""
        return name is not None and name != self.name

    def is_new(self, name: str | None) -> bool:
        """Note the name of the current weights. True if the weights have changed."""
        if name is None or not self.differs(name):
            return False
        self.name = name
        self._known.add(name)
        return True

    def goes_back(self, name: str) -> bool:
        """True if these weights are older than the current ones: the name was used before, or its number is lower."""
        if name == self.name:
            return False
        now, then = (NUMBERED.fullmatch(each) for each in (name, self.name or ""))
        is_lower = now and then and now[1] == then[1] and int(now[2]) < int(then[2])
        return name in self._known or bool(is_lower)

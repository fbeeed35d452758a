"""A bounded number of slots, shared by all rewards.

The reward with the fewest running trajectories comes first, then the highest urgency, then the first arrival. A reward
that hangs therefore leaves slots to the others.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count


class GraderBusy(RuntimeError):
    """Too many trajectories wait for a grader."""


class Urgency:
    """Urgency of a waiting trajectory, or of a whole group that shares it. It may rise meanwhile."""

    def __init__(self, level: float = 0.0) -> None:
        self.level = level
        self.waiting: set[Callable[[], None]] = set()
        """Functions that put waiting trajectories in line at the current level, one for each line."""

    def hasten(self, level: float) -> None:
        """Raise the level. A lower level changes nothing."""
        if level > self.level:
            self.level = level
            for get_in_line in self.waiting:
                get_in_line()


class Line:
    """A line for one reward, by urgency. Members of equal urgency are ordered by arrival.

    The heap has one entry per urgency, with the arrival of its first member. If that member has left, or the urgency
    has risen, the entry is out of date, and the urgency has another entry.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Urgency]] = []
        self._waiting: dict[Urgency, deque[tuple[int, asyncio.Future[None]]]] = {}
        self._enter: dict[Urgency, Callable[[], None]] = {}

    def add(self, arrival: int, urgency: Urgency, turn: asyncio.Future[None]) -> None:
        if urgency in self._waiting:
            self._waiting[urgency].append((arrival, turn))
            return
        self._waiting[urgency] = deque([(arrival, turn)])
        self._enter[urgency] = enter = partial(self._push, urgency)
        urgency.waiting.add(enter)
        enter()

    @property
    def first(self) -> tuple[float, int] | None:
        """Negated urgency and arrival of the first member, or None if the line is empty."""
        while self._heap:
            level, arrival, urgency = self._heap[0]
            waiting = self._waiting.get(urgency)
            if waiting is not None and self._drop_who_left(urgency):
                if (level, arrival) == (-urgency.level, waiting[0][0]):
                    return level, arrival
                if arrival < waiting[0][0] and level == -urgency.level:  # the first one has left
                    self._push(urgency)
            heapq.heappop(self._heap)
        return None

    def pop(self) -> asyncio.Future[None]:
        """Remove and return the turn of the first member. The line must not be empty."""
        urgency = self._heap[0][2]
        _, turn = self._waiting[urgency].popleft()
        heapq.heappop(self._heap)
        if self._drop_who_left(urgency):
            self._push(urgency)
        return turn

    def _push(self, urgency: Urgency) -> None:
        heapq.heappush(self._heap, (-urgency.level, self._waiting[urgency][0][0], urgency))

    def _drop_who_left(self, urgency: Urgency) -> bool:
        """Drop the first members that have left. Returns True if a member of this urgency still waits."""
        waiting = self._waiting[urgency]
        while waiting and waiting[0][1].done():
            waiting.popleft()
        if not waiting:
            del self._waiting[urgency]
            urgency.waiting.discard(self._enter.pop(urgency))
        return bool(waiting)


class Slots:
    def __init__(self, num_slots: int, max_waiting: int) -> None:
        """`max_waiting`: limit on waiting trajectories, for each reward."""
        self._num_free = num_slots
        self._max_waiting = max_waiting
        self._arrivals = count()
        self.num_waiting: Counter[str] = Counter()
        """Waiting trajectories by reward."""
        self.num_running: Counter[str] = Counter()
        self._lines: dict[str, Line] = defaultdict(Line)

    @asynccontextmanager
    async def one(self, reward: str, urgency: Urgency) -> AsyncIterator[None]:
        """Hold one slot. Raises: GraderBusy."""
        if self._num_free:
            self._num_free -= 1
            self.num_running[reward] += 1
        else:
            await self._turn(reward, urgency)
        try:
            yield
        finally:
            self._pass_on(reward)

    async def _turn(self, reward: str, urgency: Urgency) -> None:
        if self.num_waiting[reward] >= self._max_waiting:
            raise GraderBusy(
                f"{self._max_waiting} trajectories wait for the reward {reward} already. Wait, give it more processes, "
                "or make it faster."
            )
        turn = asyncio.get_running_loop().create_future()
        self._lines[reward].add(next(self._arrivals), urgency, turn)
        self.num_waiting[reward] += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self.num_waiting[reward] -= 1
            else:  # its turn had come
                self._pass_on(reward)
            raise

    def _pass_on(self, reward: str) -> None:
        self.num_running[reward] -= 1
        firsts = {name: first for name, line in self._lines.items() if (first := line.first) is not None}
        if not firsts:
            self._num_free += 1
            return
        name = min(firsts, key=lambda name: (self.num_running[name], firsts[name]))
        self._lines[name].pop().set_result(None)
        self.num_running[name] += 1
        self.num_waiting[name] -= 1

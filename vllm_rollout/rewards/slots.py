"""A bounded number of things at once, shared by rewards: whoever waits for the reward that has the fewest of them comes
first, then by urgency, then in order of arrival. So a reward that hangs leaves places to the others.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count


class GraderBusy(RuntimeError):
    """More trajectories wait for a grader than may."""


class Urgency:
    """How urgent somebody is who waits, or all of a group who share it. It may rise meanwhile."""

    def __init__(self, level: float = 0.0) -> None:
        self.level = level
        self.waiting: set[Callable[[], None]] = set()
        """How each who waits gets in line at the level of now."""

    def hasten(self, level: float) -> None:
        """It never falls: a lower level changes nothing."""
        if level > self.level:
            self.level = level
            for get_in_line in self.waiting:
                get_in_line()


class Slots:
    def __init__(self, num_slots: int, max_waiting: int) -> None:
        """`max_waiting`: for each reward."""
        self._num_free = num_slots
        self._max_waiting = max_waiting
        self._arrivals = count()
        self.num_waiting: Counter[str] = Counter()
        """By reward, and so are:"""
        self.num_running: Counter[str] = Counter()
        self._lines: dict[str, list[tuple[float, int, asyncio.Future[None]]]] = {}
        """By reward, each by urgency; whoever has left is still in it, whoever was hastened is in it twice."""

    @asynccontextmanager
    async def one(self, reward: str, urgency: Urgency) -> AsyncIterator[None]:
        """Raises: GraderBusy."""
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
        arrival = next(self._arrivals)

        def get_in_line() -> None:
            heapq.heappush(self._lines.setdefault(reward, []), (-urgency.level, arrival, turn))

        get_in_line()
        urgency.waiting.add(get_in_line)
        self.num_waiting[reward] += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self.num_waiting[reward] -= 1
            else:  # its turn had come
                self._pass_on(reward)
            raise
        finally:
            urgency.waiting.discard(get_in_line)

    def _pass_on(self, reward: str) -> None:
        self.num_running[reward] -= 1
        for line in self._lines.values():
            while line and line[0][2].done():
                heapq.heappop(line)
        waiting = [name for name, line in self._lines.items() if line]
        if not waiting:
            self._num_free += 1
            return
        name = min(waiting, key=lambda name: (self.num_running[name], self._lines[name][0][:2]))
        heapq.heappop(self._lines[name])[2].set_result(None)
        self.num_running[name] += 1
        self.num_waiting[name] -= 1

"""One group whose trajectories are graded as they end.

Invariant: each candidate that finished is graded at most once, and what is not returned is not waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from vllm_rollout.group.plans.plan import GroupPlan
from vllm_rollout.rewards.values import Grade
from vllm_rollout.server.attempts import Restarted
from vllm_rollout.server.engine import CandidateEnd
from vllm_rollout.server.fan_in import FanIn
from vllm_rollout.server.grading.service import LEFT, Grading


@dataclass(frozen=True, slots=True)
class Graded:
    """A trajectory has its grade."""

    end: CandidateEnd
    grade: Grade


@dataclass(frozen=True, slots=True)
class RaceOver:
    """Nothing of the group runs any more: what is awaited are grades."""


class GradedGroup:
    """Puts grades among what happens to a group."""

    def __init__(self, grading: Grading, position: int, plan: GroupPlan) -> None:
        self._grading = grading
        self._position = position
        self._plan = plan
        self._all: FanIn[Any] = FanIn(1)
        self._tasks: dict[int, asyncio.Task[Grade]] = {}
        """By index: those that were begun."""
        self._num_valid = 0

    async def happenings(self, race: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """What happens in the race, and grades; it ends with the race."""
        self._all.add(_until_over(race))
        async for happening in self._all:
            if isinstance(happening, RaceOver):
                return
            if isinstance(happening, Restarted):
                self.drop(self._tasks)
            elif isinstance(happening, CandidateEnd) and happening.ending.state == "finished":
                self._num_valid += happening.ending.valid
                self.begin(happening)
            yield happening

    async def rest(self, selected: Collection[int]) -> AsyncGenerator[Graded, None]:
        """The grades that are still awaited of these; of all others nobody wants one."""
        self.drop(index for index in self._tasks if index not in selected)
        async for graded in self._all:
            yield graded

    def drop(self, indices: Any) -> None:
        for index in indices:
            self._tasks[index].cancel()

    def begin(self, end: CandidateEnd) -> None:
        self._all.add(self._graded(end))

    async def close(self) -> None:
        await self._all.close()

    async def _graded(self, end: CandidateEnd) -> AsyncGenerator[Graded, None]:
        if self._grading.is_left:
            yield Graded(end, LEFT)
            return
        task = self._tasks[end.ending.index] = self._grading.start(self._position, end.text or "", 0.0)
        try:
            await asyncio.wait([task])
            if not task.cancelled():
                yield Graded(end, task.result())
            elif self._grading.is_left:
                yield Graded(end, LEFT)
        finally:
            task.cancel()


async def _until_over(race: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    async with aclosing(race) as happenings:
        async for happening in happenings:
            yield happening
    yield RaceOver()

"""One group whose trajectories are graded as they end. Decides which candidates to grade, and which to launch.

Invariant: no group waits for the grade of a candidate that is not returned, and every launched candidate ends. Handling
an event of one candidate takes no loop over the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from vllm_rollout.kernel.http.attempts import Graded, Lost, Restarted, attempts
from vllm_rollout.kernel.http.engine import CandidateEnd, Happening
from vllm_rollout.kernel.http.fan_in import FanIn
from vllm_rollout.kernel.http.started_group import StartedGroup
from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.kernel.rules.selection import Ranking, num_to_refill, num_wanted
from vllm_rollout.kernel.rules.types import Ending
from vllm_rollout.parts.rewards.grading.slots import Urgency
from vllm_rollout.parts.rewards.http.candidates import LaunchedCandidates
from vllm_rollout.parts.rewards.http.service import Grading


@dataclass(frozen=True, slots=True)
class _WaveOver:
    """All candidates that were launched together have ended."""


class GradedGroup:
    """Adds grades to the events of one group. A finished spare, else a new candidate, replaces a void one."""

    _ranking: Ranking
    """Ranks candidates that have finished and are not void."""
    _new: list[int]
    """Indices of candidates that have finished since the last wave ended."""
    _num_valid: int
    _num_pruned: int

    def __init__(self, grading: Grading, group: StartedGroup, candidates: LaunchedCandidates) -> None:
        self._grading = grading
        self._group = group
        self._plan = plan = group.plan
        self._candidates = candidates
        self._all: FanIn[Any] = FanIn(1)
        self._tasks: dict[int, asyncio.Task[Grade]] = {}
        """Running gradings, by candidate index."""
        self._urgency = Urgency()
        self._num_launched = plan.num_candidates
        self._next_index = plan.num_candidates
        """The next free index. The engine also uses indices, for candidates that replace lost ones."""
        self._in_wave = False
        """True while candidates run that were launched together. The next ones are launched when these have ended."""
        self._begin_again()

    async def happenings(self, race: AsyncGenerator[Happening | Restarted | Lost, None]) -> AsyncGenerator[Any, None]:
        """The events of a group and the grades of its candidates, until the group is settled."""
        self._add(race)
        try:
            async for happening in self._all:
                if isinstance(happening, _WaveOver):
                    self._in_wave = False
                    self._decide(happening)
                    continue
                if isinstance(happening, Restarted):
                    self._restart()
                if self._group.take(happening):
                    if isinstance(happening, CandidateEnd):
                        self._next_index = max(self._next_index, happening.ending.index + 1)
                    if isinstance(happening, Graded):
                        self._tasks.pop(happening.end.ending.index, None)
                    if isinstance(happening, CandidateEnd | Graded | Lost):
                        self._decide(happening)
                    yield happening
        finally:
            await self._all.close()
            self._drop(list(self._tasks))

    def _decide(self, happening: CandidateEnd | Graded | Lost | _WaveOver) -> None:
        """Launch, grade or drop candidates after an event."""
        plan = self._plan
        heir = None
        if isinstance(happening, CandidateEnd):
            self._take(happening.ending)
        elif isinstance(happening, Graded) and happening.grade.status == "void":
            heir = self._ranking.drop(happening.end.ending)
        if self._in_wave:
            return
        if isinstance(happening, _WaveOver):
            chosen: Collection[int] = self._new
            if len(self._ranking) > plan.group_size:
                chosen = set(self._ranking.selected)
                self._drop(self._tasks.keys() - chosen)
            self._grade(chosen)
            self._new = []
        elif heir is not None:
            self._grade([heir])
        num_alive = self._ranking.num_selected
        is_short = self._group.void and num_alive < num_wanted(plan, self._num_pruned)
        if is_short and not (self._grading.is_left or self._group.is_cut):
            most = self._grading.max_candidates or 2 * plan.num_candidates
            self._launch(num_to_refill(plan.group_size, most, self._num_launched, num_alive))

    def _take(self, ending: Ending) -> None:
        self._num_pruned += ending.state == "pruned"
        if ending.state != "finished":
            return
        plan = self._plan
        self._ranking.add(ending)
        self._new.append(ending.index)
        self._num_valid += ending.valid
        self._urgency.hasten(self._num_valid / plan.group_size)
        # In a race that stops early a truncated one hardly ever comes back.
        if ending.valid or plan.returns_all or not plan.early_stop:
            self._grade([ending.index])

    def _restart(self) -> None:
        """Drop all gradings. Everything known about the group is void."""
        self._drop(list(self._tasks))
        self._next_index = self._num_launched
        self._begin_again()

    def _begin_again(self) -> None:
        self._ranking, self._new = Ranking(self._plan), []
        self._num_valid = self._num_pruned = 0

    def _add(self, race: AsyncGenerator[Any, None]) -> None:
        async def wave() -> AsyncGenerator[Any, None]:
            async with aclosing(race) as happenings:
                async for happening in happenings:
                    yield happening
            yield _WaveOver()

        self._in_wave = True
        self._all.add(wave())

    def _launch(self, num_candidates: int) -> None:
        """Launch candidates. A candidate that is lost with its rank does not run again: others take its place, up to
        the maximum."""
        if num_candidates:
            indices = range(self._next_index, self._next_index + num_candidates)
            self._num_launched = self._next_index = indices.stop
            self._add(attempts(lambda: self._candidates.more(indices), "fail", _nothing))

    def _grade(self, indices: Iterable[int]) -> None:
        """Start to grade candidates that have no grade and are not being graded."""
        if self._grading.is_left:
            return
        for index in indices:
            if index not in self._group.grades and index not in self._tasks:
                end = self._group.ends[index]
                self._tasks[index] = task = self._grading.start(self._group.position, end, self._urgency)
                self._all.add(_graded(end, task))

    def _drop(self, indices: Iterable[int]) -> None:
        for index in indices:
            if (task := self._tasks.pop(index, None)) is not None:
                task.cancel()


async def _graded(end: CandidateEnd, task: asyncio.Task[Grade]) -> AsyncGenerator[Graded, None]:
    await asyncio.wait([task])
    if not task.cancelled():
        yield Graded(end, task.result())


async def _nothing() -> None:
    """Does nothing. It stands for the wait before a retry that never happens."""

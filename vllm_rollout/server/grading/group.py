"""One group whose trajectories are graded as they end: who is graded, who is launched because of it, what comes back.

Invariant: nobody waits for the grade of a candidate that is not returned, and every candidate that was launched ends.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection, Set
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from vllm_rollout.group.rewards.until import CandidateReward, Decision, UntilTerms, decide, num_to_refill
from vllm_rollout.group.types import GroupResult
from vllm_rollout.rewards.slots import Urgency
from vllm_rollout.rewards.values import Grade
from vllm_rollout.server.attempts import Graded, Lost, Restarted, attempts
from vllm_rollout.server.engine import CandidateEnd, CandidateTokens, Happening
from vllm_rollout.server.fan_in import FanIn
from vllm_rollout.server.grading.candidates import LaunchedCandidates
from vllm_rollout.server.grading.service import Grading
from vllm_rollout.server.started_group import StartedGroup


@dataclass(frozen=True, slots=True)
class _WaveOver:
    """Candidates that were launched together have all ended."""


class GradedGroup(ABC):
    """Reads what happens to one group, and puts grades among it."""

    def __init__(self, grading: Grading, group: StartedGroup, candidates: LaunchedCandidates) -> None:
        self._grading = grading
        self._group = group
        self._plan = plan = group.plan.group
        self._candidates = candidates
        self._all: FanIn[Any] = FanIn(1)
        self._tasks: dict[int, asyncio.Task[Grade]] = {}
        """By index: the newest of each."""
        self._urgency = Urgency()
        self._num_launched = plan.num_candidates
        self.decision: Decision | None = None
        """With `until` "variance", once it is over."""
        self._num_waves = 0
        """That are not over."""
        self._told_in_vain: Set[int] = frozenset()
        """Indices of later candidates that run on while the group begins again: readers have dropped their tokens."""

    async def happenings(self, race: AsyncGenerator[Happening | Restarted | Lost, None]) -> AsyncGenerator[Any, None]:
        """What happens to the group, and grades among it, until nothing more can come of it."""
        self._add(race)
        try:
            async for happening in self._all:
                if isinstance(happening, _WaveOver):
                    self._num_waves -= 1
                    await self._decide()
                    continue
                if isinstance(happening, Restarted):
                    self._restart()
                if isinstance(happening, CandidateTokens) and happening.index in self._told_in_vain:
                    continue  # they come again, at its end
                if self._group.take(happening):
                    if not isinstance(happening, Restarted | CandidateTokens):
                        await self._decide()
                    if isinstance(happening, CandidateEnd) and (tokens := self._told_again(happening)) is not None:
                        yield tokens
                    yield happening
        finally:
            await self._all.close()
            self._drop(self._tasks)

    @abstractmethod
    def result(self) -> GroupResult:
        """What has become of it."""

    @abstractmethod
    async def _decide(self) -> None:
        """Something has happened: launch, stop, grade or drop what that asks for."""

    def _restart(self) -> None:
        """What is known is void, and will be forgotten."""
        self._drop(self._tasks)
        self._tasks.clear()
        self._told_in_vain = self._candidates.launched_later - self._group.ends.keys()

    def _told_again(self, end: CandidateEnd) -> CandidateTokens | None:
        """All that it has said, if a reader has dropped the beginning."""
        index, state = end.ending.index, end.ending.state
        if state != "finished" or index not in self._told_in_vain or not self._candidates.stream_tokens:
            return None
        return CandidateTokens(index, 0, end.token_ids, end.logprobs)

    def _add(self, race: AsyncGenerator[Any, None]) -> None:
        async def wave() -> AsyncGenerator[Any, None]:
            async with aclosing(race) as happenings:
                async for happening in happenings:
                    yield happening
            yield _WaveOver()

        self._num_waves += 1
        self._all.add(wave())

    def _launch(self, num_candidates: int) -> None:
        """One that is lost, with its rank, does not run again: as many come in its place as may."""
        if num_candidates:
            first = max([self._num_launched, *(index + 1 for index in self._group.ends)])
            self._num_launched = first + num_candidates
            indices = range(first, self._num_launched)
            self._add(attempts(lambda: self._candidates.more(indices), "fail", _nothing))

    def _grade(self, indices: Collection[int]) -> None:
        """Those that have no grade and are not being graded."""
        if self._grading.is_left:
            return
        for index in indices:
            task = self._tasks.get(index)
            if index not in self._group.grades and (task is None or task.cancelled() or task.cancelling()):
                end = self._group.ends[index]
                task = self._grading.start(self._group.position, end, self._urgency)
                self._tasks[index] = task
                self._all.add(_graded(end, task))

    def _drop(self, indices: Collection[int]) -> None:
        for index in indices:
            if index in self._tasks:
                self._tasks[index].cancel()


async def _graded(end: CandidateEnd, task: asyncio.Task[Grade]) -> AsyncGenerator[Graded, None]:
    await asyncio.wait([task])
    if not task.cancelled():
        yield Graded(end, task.result())


class WholeGroup(GradedGroup):
    """Returns what its race selects; a void one leaves its place to a spare that has finished, else to a new one."""

    def result(self) -> GroupResult:
        return self._group.concluded()

    async def _decide(self) -> None:
        finished = self._group.finished
        self._urgency.hasten(sum(ending.valid for ending in finished) / self._plan.group_size)
        if self._num_waves:
            # In a race that stops early a truncated one hardly ever comes back.
            sure = [e.index for e in finished if e.valid or self._plan.returns_all or not self._plan.early_stop]
            self._grade(sure)
            return
        result = self.result()
        self._drop(self._tasks.keys() - set(result.selected))
        self._grade(result.selected)
        if self._group.void and result.status == "incomplete" and not (self._grading.is_left or self._group.is_cut):
            most = self._grading.max_candidates or 2 * self._plan.num_candidates
            num_alive = len(result.selected)
            self._launch(num_to_refill(self._plan.group_size, most, self._num_launched, num_alive))


class TeachingGroup(GradedGroup):
    """Goes on until its rewards differ (`until` "variance", docs/until.md)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        plan = self._plan
        self._terms = UntilTerms.of(plan.group_size, plan.num_candidates, self._grading.max_candidates)
        self._prior = self._grading.prior(self._group.position)
        self._stopped: set[int] = set()

    def result(self) -> GroupResult:
        plain = self._group.concluded()
        if self.decision is None:
            return GroupResult("incomplete", "its rewards were not waited for", (), plain.endings)
        reason = None
        if self.decision.kind == "incomplete":
            num, size = len(self.decision.returned), self._plan.group_size
            reason = f"{num} of {len(plain.endings)} candidates have a reward, group_size is {size}"
        return GroupResult("incomplete" if reason else "complete", reason, self.decision.returned, plain.endings)

    async def _decide(self) -> None:
        if self.decision is not None or self._grading.is_left:
            return
        if self._group.is_cut:
            self._drop(self._tasks)
            return
        self._grade([ending.index for ending in self._group.finished if ending.index not in self._stopped])
        self._urgency.hasten(min(1.0, len(self._group.grades) / self._plan.group_size))
        seen = [self._seen(index) for index in range(self._num_launched)]
        decision = decide(self._terms, seen, self._prior)
        self._launch(decision.launch)
        if decision.kind != "wait":
            self.decision = decision
        if stop := set(decision.stop) - self._stopped:
            self._stopped |= stop
            self._drop(stop)
            await self._candidates.stop(stop - self._group.ends.keys())

    def _restart(self) -> None:
        super()._restart()
        self.decision = None
        self._stopped = self._candidates.launched_later & self._group.ends.keys()  # they do not run again

    def _seen(self, index: int) -> CandidateReward:
        end, grade = self._group.ends.get(index), self._group.grades.get(index)
        if grade is not None:
            return CandidateReward(index, "gone" if grade.reward is None else "graded", grade.reward)
        if index in self._stopped or (end is not None and end.ending.state != "finished"):
            return CandidateReward(index, "gone")
        if end is None:
            return CandidateReward(index, "running")
        said = [each.success_probability for each in (end.final, end.assessment) if each is not None]
        return CandidateReward(index, "awaited", chance=next((each for each in said if each is not None), None))


async def _nothing() -> None:
    """Before a retry of what is not tried again."""

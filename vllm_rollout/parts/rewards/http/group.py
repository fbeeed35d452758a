"""One group whose trajectories are graded as they end. Decides which candidates to grade, and which to launch.

Invariant: no group waits for the grade of a candidate that is not returned, and every launched candidate ends. Handling
an event of one candidate takes no loop over the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable

from vllm_rollout.kernel.http.answers import GroupRewards
from vllm_rollout.kernel.http.engine import CandidateEnd
from vllm_rollout.kernel.http.plan_port import GroupPart, GroupRecord, Over
from vllm_rollout.kernel.http.reports import Graded, attempts
from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.kernel.rules.selection import num_wanted
from vllm_rollout.kernel.rules.types import Ending, is_too_late
from vllm_rollout.parts.rewards.grading.slots import Urgency
from vllm_rollout.parts.rewards.http.candidates import LaunchedCandidates
from vllm_rollout.parts.rewards.http.service import Grading
from vllm_rollout.parts.rewards.rules.estimates import advantages, summarize
from vllm_rollout.parts.rewards.rules.refill import SpareRanking, num_to_refill

Teach = Callable[[GroupRecord], Awaitable[None]]
"""Learns from the grades of a group that is over."""


class GradedGroup(GroupPart):
    """Adds grades to the reports of one group. A finished spare, else a new candidate, replaces a void one.

    Overrides: adds_sources, ended, graded, restarted, launch_over, stopped, decided, account.
    """

    adds_sources = True

    _ranking: SpareRanking
    """Ranks candidates that have finished and are not void."""
    _new: list[int]
    """Indices of candidates that have finished since the last wave ended."""
    _num_valid: int
    _num_pruned: int

    def __init__(self, grading: Grading, group: GroupRecord, candidates: LaunchedCandidates, teach: Teach) -> None:
        """`teach`: learns from the group's grades, once it is over."""
        self._grading = grading
        self._group = group
        self._plan = plan = group.plan
        self._candidates = candidates
        self._teach = teach
        self._tasks: dict[int, asyncio.Task[Grade]] = {}
        """Running gradings, by candidate index."""
        self._urgency = Urgency()
        self._num_launched = plan.num_candidates
        self._next_index = plan.num_candidates
        """The next free index. The engine also uses indices, for candidates that replace lost ones."""
        self._in_wave = True
        """True while candidates run that were launched together. The next ones are launched when these have ended."""
        self._begin_again()

    def ended(self, end: CandidateEnd) -> None:
        self._next_index = max(self._next_index, end.ending.index + 1)
        self._take(end.ending)
        self._decide()

    def graded(self, index: int, grade: Grade) -> None:
        self._tasks.pop(index, None)
        heir = self._ranking.drop(self._group.ends[index].ending) if grade.status == "void" else None
        self._decide(() if heir is None else [heir])

    def launch_over(self) -> None:
        self._in_wave = False
        chosen: Collection[int] = self._new
        if len(self._ranking) > self._plan.group_size:
            chosen = set(self._ranking.selected)
            self._drop(self._tasks.keys() - chosen)
        self._new = []
        self._decide(chosen)

    def restarted(self) -> None:
        """Drop all gradings. Everything known about the group is void."""
        self._drop(list(self._tasks))
        self._next_index = self._num_launched
        self._begin_again()

    def stopped(self) -> None:
        self._drop(list(self._tasks))

    def decided(self, over: Over) -> None:
        if over.deferred_because is not None:
            return
        options = self._grading.options
        rewards = list(self._group.rewards_of(over.result.selected).values())
        over.fields["rewards"] = GroupRewards(
            name=options.name,
            **summarize(rewards)._asdict(),
            estimator=options.estimator,
            advantages=advantages(rewards, options.estimator),
        )

    async def account(self, over: Over) -> None:
        await self._teach(self._group)

    def _decide(self, to_grade: Collection[int] = ()) -> None:
        """Grade these candidates and launch others, unless candidates run that were launched together."""
        if self._in_wave:
            return
        self._grade(to_grade)
        plan, num_alive = self._plan, self._ranking.num_selected
        is_short = self._group.void and num_alive < num_wanted(plan, self._num_pruned)
        if is_short and not (self._grading.is_left or self._is_cut):
            most = self._grading.max_candidates or 2 * plan.num_candidates
            self._launch(num_to_refill(plan.group_size, most, self._num_launched, num_alive))

    @property
    def _is_cut(self) -> bool:
        """True if its round goes on without this group, perhaps because it completed after as many as were wanted."""
        return any(is_too_late(end.parts) or end.ending.state == "deferred" for end in self._group.ends.values())

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

    def _begin_again(self) -> None:
        self._ranking, self._new = SpareRanking(self._plan), []
        self._num_valid = self._num_pruned = 0

    def _launch(self, num_candidates: int) -> None:
        """Launch candidates. One that is lost with its rank, or finds none, does not run again: others take its place,
        up to the maximum."""
        if num_candidates:
            indices = range(self._next_index, self._next_index + num_candidates)
            self._num_launched = self._next_index = indices.stop
            self._in_wave = True
            more = attempts(lambda: self._candidates.more(indices), "fail", _nothing, has_begun=True)
            self._group.sources.launch(more)

    def _grade(self, indices: Iterable[int]) -> None:
        """Start to grade candidates that have no grade and are not being graded."""
        if self._grading.is_left:
            return
        for index in indices:
            if index not in self._group.grades and index not in self._tasks:
                end = self._group.ends[index]
                self._tasks[index] = task = self._grading.start(self._group.position, end, self._urgency)
                self._group.sources.add(_graded(end, task))

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

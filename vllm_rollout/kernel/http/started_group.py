"""One group of a running rollout: turns the engine's reports on its candidates into events for the client.

Invariant: each candidate and each grade of the attempt that counts is sent once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from statistics import fmean, pstdev
from typing import Any

from vllm_rollout.kernel.http.answers import (
    Allocation,
    CandidateEvent,
    Event,
    GroupEvent,
    GroupLengths,
    RestartedEvent,
    RewardEvent,
    TrajectoryEvent,
)
from vllm_rollout.kernel.http.ended import candidate_of, reward_of, tokens_of, trajectory_of
from vllm_rollout.kernel.http.engine import CandidateEnd, CandidateTokens, GroupOrder, Happening
from vllm_rollout.kernel.http.launch import Places
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.http.plan_port import GroupRecord, Launch, Over
from vllm_rollout.kernel.http.reports import Graded, LaunchOver, Lost, Restarted, attempts
from vllm_rollout.kernel.http.rollout import Rollout
from vllm_rollout.kernel.rules.fields import OnEngineFailure
from vllm_rollout.kernel.rules.selection import conclude
from vllm_rollout.kernel.rules.types import GroupResult


class StartedGroup(GroupRecord):
    """The group of the prompt at one position."""

    def __init__(
        self, rollout: Rollout, position: int, places: Places, order: GroupOrder, metrics: Metrics, started_s: float
    ) -> None:
        """`order`: before parts change it. `started_s`: seconds from the rollout's beginning until now."""
        prompt, plan = rollout.prompts[position], rollout.plans[position].group
        super().__init__(position, order.group_id, prompt, plan, started_s, places, order)
        self._rollout = rollout
        self._metrics = metrics
        self._names = {"prompt_id": self.prompt.id, "group_id": self.id}
        self._told: set[int] = set()
        self._off_policy: set[int] = set()
        """Indices of trajectories that are off policy."""
        self.parts = [made for part in rollout.parts if (made := part.group(self)) is not None]
        for part in self.parts:
            self.order = part.ordered(self.order)

    async def reports(self, launch: Launch, on_engine_failure: OnEngineFailure) -> AsyncGenerator[Any, None]:
        """Run the group. Yields each report that counts, once it is recorded. `launch`: unless a part has another."""
        for part in self.parts:
            launch = part.launching(launch)
        take_places = partial(self.places.take_again, self.plan.num_candidates)
        race = attempts(partial(launch, self.order), on_engine_failure, take_places)
        try:
            if any(part.adds_sources for part in self.parts):
                self.sources.launch(race)
                async for report in self.sources:
                    if self._take(report):
                        yield report
            else:  # a task less
                async with aclosing(race) as reports:
                    async for report in reports:
                        if self._take(report):
                            yield report
        finally:
            await self.sources.close()
            for part in self.parts:
                part.stopped()

    def _take(self, happening: Happening | Restarted | Lost | Graded | LaunchOver) -> bool:
        """Record a report, before its events are made. True if it belongs to the attempt that counts."""
        match happening:
            case LaunchOver():
                for part in self.parts:
                    part.launch_over()
                return False
            case Restarted():
                self._rollout.outcome.num_ended -= len(self.ends)
                self._rollout.outcome.usage.num_restarted += 1
                for known in (self.ends, self.grades, self.void, self._told, self._off_policy):
                    known.clear()
                for part in self.parts:
                    part.restarted()
            case Lost():
                self.lost = happening
            case Graded(end, grade):
                if self.ends.get(end.ending.index) is not end:
                    return False
                self.grades[end.ending.index] = grade
                if grade.status == "void":
                    self.void.add(end.ending.index)
                for part in self.parts:
                    part.graded(end.ending.index, grade)
            case CandidateEnd():
                self._take_end(happening)
        return True

    def events_of(self, happening: Happening | Restarted | Lost | Graded) -> Iterator[Event]:
        """The events that the client is sent for this report now."""
        if isinstance(happening, CandidateTokens):
            yield tokens_of(self.prompt.id, happening, self._rollout.included)
        elif isinstance(happening, Restarted):
            yield RestartedEvent(**self._names, reason=happening.reason)
        elif isinstance(happening, Graded):
            yield from self._graded(happening)
        elif isinstance(happening, CandidateEnd):
            yield from self._ended(happening)

    def _ended(self, end: CandidateEnd) -> Iterator[Event]:
        # With early stop the engine counts exactly group_size winners: each of them is sure at its end.
        if self.plan.early_stop and end.ending.valid:
            yield self._trajectory(end)
        elif end.ending.state != "finished":  # nothing can select it any more: a reader may drop it now
            yield self._dropped(end)

    def _graded(self, graded: Graded) -> Iterator[Event]:
        """Events for a grade. None if the trajectory comes later with its grade, or never comes."""
        index = graded.end.ending.index
        if index in self._told:
            yield RewardEvent(**self._names, index=index, **reward_of(graded.grade))
            if graded.grade.status == "void":
                yield self._dropped(graded.end)

    async def over(self) -> Over:
        """The end of the group by its plan, as parts change it."""
        lost_why = None if self.lost is None else self.lost.reason
        over = Over(conclude(self.plan, (end.ending for end in self.ends.values()), lost_why, self.void))
        for part in self.parts:
            await part.over(over)
        for part in self.parts:
            part.decided(over)
        return over

    def events_of_the_rest(self, result: GroupResult) -> Iterator[Event]:
        """Events of candidates that had none while the group ran. Selected candidates come first."""
        yield from (self._trajectory(self.ends[index]) for index in result.selected if index not in self._told)
        for ending in result.endings:
            if ending.index not in self._told:
                yield self._dropped(self.ends[ending.index])

    async def account(self, over: Over, latency_s: float) -> None:
        """Count the group, and let parts learn from it. `latency_s`: from the rollout's beginning."""
        self._rollout.outcome.group_over(over.result, self.ends.values(), self.grades.values(), latency_s)
        self._metrics.group_over(over.result, latency_s, self.plan)
        over.final = over.result.endings
        for part in self.parts:
            await part.keep(over)
        for part in self.parts:
            await part.account(over)

    def last_event(self, over: Over) -> Event:
        result = over.result
        if over.event is not None:
            return over.event
        off_policy = not self._off_policy.isdisjoint(result.selected)
        self._rollout.outcome.off_policy |= off_policy
        return GroupEvent(
            **self._names,
            status=result.status,
            reason=result.reason,
            selected=list(result.selected),
            prompt_token_ids=list(self.prompt.token_ids),
            lengths=lengths_of([self.ends[i].ending.num_tokens for i in result.selected]),
            allocation=self._allocation(),
            off_policy=off_policy,
            weight_versions=list(
                dict.fromkeys(span["version"] for i in result.selected for span in self.ends[i].weight_versions)
            ),
            audit=self.plan.audit,
            **over.fields,
        )

    def _allocation(self) -> Allocation:
        reasons = self._rollout.plans[self.position].allocation
        fields = {} if reasons is None else asdict(reasons)
        return Allocation(**{**fields, "num_candidates": self.plan.num_candidates, "selection": self.plan.selection})

    def _take_end(self, end: CandidateEnd) -> None:
        if not end.is_replaced:  # by one that takes its place
            self.places.release(1)
        self.ends[end.ending.index] = end
        for part in self.parts:
            part.ended(end)
        self._rollout.outcome.num_ended += 1
        if end.parts:
            self._metrics.noted(end.parts)

    def _trajectory(self, end: CandidateEnd) -> TrajectoryEvent:
        rollout = self._rollout
        self._told.add(end.ending.index)
        grade = self.grades.get(end.ending.index)
        fields = self.fields_of(end, selected=True)
        trajectory = trajectory_of(end, rollout.included, fields, rollout.began_with, grade)
        if trajectory.off_policy:
            self._off_policy.add(trajectory.index)
        return TrajectoryEvent(**self._names, trajectory=trajectory)

    def _dropped(self, end: CandidateEnd) -> CandidateEvent:
        self._told.add(end.ending.index)
        return CandidateEvent(**self._names, candidate=candidate_of(end, self._rollout.included, self.fields_of(end)))


def lengths_of(num_tokens: Sequence[int]) -> GroupLengths:
    """Mean, population standard deviation and maximum, in tokens. Zeros if `num_tokens` is empty."""
    if not num_tokens:
        return GroupLengths(mean=0.0, std=0.0, max=0)
    return GroupLengths(mean=fmean(num_tokens), std=pstdev(num_tokens), max=max(num_tokens))

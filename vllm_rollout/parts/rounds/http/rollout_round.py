"""A round whose candidates are answers of the engine. Invariant: that of `live.py`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from vllm_rollout.kernel.http.answers import DoneEvent, Event, GroupAnswer, GroupEvent
from vllm_rollout.kernel.http.rollout import Rollout
from vllm_rollout.kernel.http.serialised import GroupsInJson
from vllm_rollout.parts.rounds.http.answers import (
    DeferredEvent,
    FilteredEvent,
    RoundAnswer,
    RoundDoneEvent,
    RoundSummary,
)
from vllm_rollout.parts.rounds.http.course import RoundCourse
from vllm_rollout.parts.rounds.http.ended_groups import ended_before, events_of
from vllm_rollout.parts.rounds.http.live import Keep, LiveEvent, LiveRound, Spent
from vllm_rollout.parts.rounds.http.resumed import Resumption
from vllm_rollout.parts.rounds.http.stored import PlannedRound


@dataclass(slots=True, kw_only=True, eq=False)
class RolloutRound(LiveRound):
    """A round that is a rollout."""

    rollout: Rollout
    course: RoundCourse
    resumption: Resumption | None = None
    """None if candidates neither continue from an earlier round nor may continue in a later one."""
    run: Callable[[Rollout], AsyncGenerator[Event, None]]
    """Runs the rollout."""
    groups: GroupsInJson = field(default_factory=GroupsInJson)
    before: Mapping[int, GroupAnswer] = field(default_factory=dict)
    """Groups that were complete when the round was interrupted, by position. Groups without variance come first,
    since a filter has others in their place."""

    def take_up(self, planned: PlannedRound) -> None:
        assert self.ended is not None
        found = ended_before(planned, self.ended.version, GroupAnswer)
        self.before = dict(
            sorted(found.items(), key=lambda item: item[1].rewards is not None and item[1].rewards.teaches)
        )

    async def events(self, keep: Keep) -> AsyncGenerator[LiveEvent, None]:
        rollout, course = self.rollout, self.course
        filtered: list[str] = []
        over: set[str] = set()
        """Ids of prompts whose `group` event was sent. Their `filtered` event comes after it."""

        def filter_out(prompt_id: str) -> None:
            filtered.append(prompt_id)
            for part in rollout.parts:
                part.filtered(prompt_id)

        course.on_filtered = filter_out
        for position, group in self.before.items():
            rollout.ended_before(group)
            for event in events_of(group):
                await self.groups.add(event)
                yield event
            over.add(group.prompt_id)
            course.ended_before(position, group)
        for position in self.progress.lost_before() if self.before else ():
            yield DeferredEvent(prompt_id=self.opened.all_entries[position].prompt_id, group_id="", reason="cut")
        async with aclosing(self.run(rollout)) as events:
            async for event in events:
                for prompt_id in [each for each in filtered if each in over]:
                    filtered.remove(prompt_id)
                    yield FilteredEvent(prompt_id=prompt_id)
                if isinstance(event, DoneEvent):
                    yield await keep()
                else:
                    await self.groups.add(event)
                    if isinstance(event, GroupEvent) and event.status == "complete" and self.ended is not None:
                        self.ended.add(course.number_of(event.prompt_id), self.groups.of(event.prompt_id))
                    yield event
                    if isinstance(event, GroupEvent):
                        over.add(event.prompt_id)

    def spent(self) -> Spent:
        outcome, course, resumption = self.rollout.outcome, self.course, self.resumption
        outcome.usage.returned_tokens -= course.filtered_tokens
        outcome.usage.wasted_tokens += course.filtered_tokens
        course.filtered_tokens = 0
        kept = {} if resumption is None else resumption.kept
        return Spent(
            outcome.timing.latency_s,
            outcome.usage.generated_tokens,
            outcome.usage.returned_tokens,
            self.rollout.receipt,
            {self.opened.all_entries[position].number: blob for position, blob in kept.items()},
        )

    def parts(self, told: RoundSummary) -> list[bytes]:
        envelope = RoundAnswer(**told.model_dump(), **self.rollout.envelope(), groups=[])
        fates = self.progress.fates
        ids = [e.prompt_id for i, e in enumerate(self.opened.all_entries) if fates.get(i) == "returned"]
        return self.groups.answer(envelope, ids)

    def done(self, told: RoundSummary) -> RoundDoneEvent:
        return RoundDoneEvent(**told.model_dump(), **self.rollout.envelope())

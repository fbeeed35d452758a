"""Rounds in the life of a rollout: its groups race, may be deferred, and go on in a later round."""

from __future__ import annotations

from dataclasses import replace

from vllm_rollout.kernel.http.engine import CandidateEnd, Engine, GroupOrder
from vllm_rollout.kernel.http.plan_port import GroupPart, GroupRecord, Launch, Over, RolloutPart
from vllm_rollout.kernel.http.rollout import Rollout
from vllm_rollout.kernel.rules.selection import deferred
from vllm_rollout.kernel.rules.types import is_too_late
from vllm_rollout.parts.rounds.http.answers import DeferredEvent
from vllm_rollout.parts.rounds.http.course import RoundCourse
from vllm_rollout.parts.rounds.http.resumed import ResumedGroup, Resumption


class RoundPart(RolloutPart):
    """A rollout that is a round of a run. Overrides: group."""

    def __init__(self, engine: Engine, rollout: Rollout, course: RoundCourse, resumption: Resumption | None) -> None:
        """`resumption`: None if candidates neither continue from an earlier round nor may continue in a later one."""
        self.engine = engine
        self.rollout = rollout
        self.course = course
        self.resumption = resumption

    def group(self, record: GroupRecord) -> GroupPart:
        return RoundGroup(self, record)


class RoundGroup(GroupPart):
    """One group. Overrides: ordered, launching, ended, restarted, over, keep, told."""

    def __init__(self, round: RoundPart, record: GroupRecord) -> None:
        self._round = round
        self._record = record
        self._course, self._position = round.course, record.position

    def ordered(self, order: GroupOrder) -> GroupOrder:
        return replace(order, said_once=self._course.said(self._position))

    def launching(self, launch: Launch) -> Launch:
        resumption, rollout, engine = self._round.resumption, self._round.rollout, self._round.engine
        kept = None if resumption is None else resumption.before.get(self._position)
        if kept is None:
            return launch
        want_text = "text" in rollout.included or rollout.is_graded
        return lambda order: ResumedGroup(kept, engine, order, want_text=want_text).events()

    def ended(self, end: CandidateEnd) -> None:
        self._course.candidate_ended(self._position, end.ending)

    def restarted(self) -> None:
        self._course.restarted(self._position)

    async def over(self, over: Over) -> None:
        lost = any(is_too_late(end.parts) for end in self._record.ends.values())
        reason = await self._course.group_over(self._position, over.result, lost=lost)
        if reason is not None:
            over.result, over.deferred_because = deferred(over.result, reason), reason
            over.event = DeferredEvent(prompt_id=self._record.prompt.id, group_id=self._record.id, reason=reason)

    async def keep(self, over: Over) -> None:
        record, resumption = self._record, self._round.resumption
        if over.deferred_because is None or resumption is None or not resumption.keeps:
            return
        over.final, warning = await resumption.keep(self._position, record)
        self._round.rollout.warnings += [] if warning is None else [warning]

    async def told(self, over: Over) -> None:
        if self._round.rollout.is_graded and over.deferred_because is None:
            await self._course.graded(self._position, self._record.rewards_of(over.result.selected))

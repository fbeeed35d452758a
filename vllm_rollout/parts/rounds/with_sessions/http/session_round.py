"""A round whose candidates are sessions. Each prompt has a group of sessions, which a harness runs.

Invariant: `RoundProgress` decides on prompts, from reports that groups make in the call in which they end. When enough
groups are complete, the others have stopped before anything else happens to them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.serialised import encode, filled
from vllm_rollout.parts.rounds.http.answers import DeferredEvent, FilteredEvent, OpenGroupAnswer, RoundSummary
from vllm_rollout.parts.rounds.http.ended_groups import ended_before
from vllm_rollout.parts.rounds.http.live import Keep, LiveEvent, LiveRound, Spent
from vllm_rollout.parts.rounds.http.stored import PlannedRound
from vllm_rollout.parts.rounds.rules.round_progress import GroupEnd
from vllm_rollout.parts.rounds.with_sessions.http.answers import (
    ReturnedEvent,
    SessionRoundAnswer,
    SessionRoundDoneEvent,
    SessionRoundEvent,
    UnstartedEvent,
)
from vllm_rollout.parts.sessions.http.body import (
    DeclaredEvent,
    PromptSessions,
    SessionEvent,
    SessionGroupRequest,
    SessionOptions,
)
from vllm_rollout.parts.sessions.http.groups import Event, OpenGroup
from vllm_rollout.parts.sessions.http.service import SEE_OUT_S, TICK_S, SessionService


class SessionTerms(NamedTuple):
    """Terms that all groups of a round share."""

    options: SessionOptions
    group_size: int
    redundancy: int

    def request(self, id: str, data: Any = None) -> SessionGroupRequest:
        """The request for one group."""
        return self.options.group(id, self.group_size, self.redundancy, data)


class Declared(NamedTuple):
    """A declared group, and the position of its prompt."""

    position: int
    group: OpenGroup


@dataclass(slots=True, kw_only=True, eq=False)
class SessionRound(LiveRound):
    """Declares a group for each of its prompts, and watches the groups."""

    created: int
    model: str
    namespace: str
    """Namespace of the client that owns the sessions."""
    terms: SessionTerms
    prompts: Sequence[dict[str, Any]]
    """Prompts by position."""
    sessions: SessionService
    before: Mapping[int, PromptSessions] = field(default_factory=dict)
    """Groups that were complete when the round was interrupted, by position. If the round filters, their rewards
    differ."""
    _declared: list[Declared] = field(default_factory=list)
    _running: dict[str, Declared] = field(default_factory=dict)
    """Running groups by id."""
    _awaited: dict[str, Declared] = field(default_factory=dict)
    """Returned groups by id, as long as the harness has not finished all their returned sessions."""
    _told: deque[SessionRoundEvent | Declared] = field(default_factory=deque)
    """Events to send. A `Declared` stands for the event of a returned group."""
    _answers: dict[int, bytes] = field(default_factory=dict)
    """JSON of returned groups, by position."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _heard: tuple[float, float] | None = None
    """Time of the last call of `heard_s`, and the time that it returned."""
    _seconds: float = 0.0

    @property
    def groups_to_run(self) -> list[OpenGroupAnswer]:
        return [
            OpenGroupAnswer(prompt_id=self._prompt_id(position), group_id=id)
            for id, (position, _) in self._running.items()
        ]

    def take_up(self, planned: PlannedRound) -> None:
        assert self.ended is not None
        self.before = ended_before(planned, self.ended.version, PromptSessions)

    async def events(self, keep: Keep) -> AsyncGenerator[LiveEvent, None]:
        began_s = over_s = self.sessions.now_s()
        try:
            for position, before in self.before.items():
                yield await self._returned_before(position, before)
            for position in self.progress.lost_before() if self.before else ():
                yield DeferredEvent(prompt_id=self._prompt_id(position), group_id="", reason="cut")
            while True:
                self._changed.clear()
                self._declare()
                while self._told:
                    told = self._told.popleft()
                    yield await self._returned(told) if isinstance(told, Declared) else told
                if not (self.progress.is_over and not self._awaited):
                    over_s = self.sessions.now_s()
                elif not self._told and (self._is_counted or self.sessions.now_s() - over_s > SEE_OUT_S):
                    break
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):  # as in `RoundCourse`
                        await self._changed.wait()
                self._stop_awaiting()
            self._seconds = over_s - began_s
            self._check_served()
            yield await keep()
        finally:
            self._leave()

    # Events of its groups.

    def heard_s(self, now_s: float) -> float:
        """Time of the harness's last activity in any group. A harness that runs a few groups at a time lets the
        others wait."""
        if self._heard is None or self._heard[0] != now_s:
            races = [group.race for _, group in self._declared]
            heard_s = now_s if any(race.has_open for race in races) else max(race.active_s for race in races)
            self._heard = now_s, heard_s
        return self._heard[1]

    def told(self, event: Event) -> None:
        if isinstance(event, SessionEvent):  # what becomes of the group is for the round to say
            self._told.append(event)
            self._changed.set()

    def over(self, group: OpenGroup) -> None:
        declared = self._running.pop(group.id, None)
        if declared is None:  # the round stops it
            return
        lengths = {session.index: session.num_tokens for session in group.race.sessions.values()}
        result = group.race.result
        longest = max((lengths[index] for index in result.selected), default=0)
        position = declared.position
        if self.progress.group_over(position, GroupEnd(result.status == "complete", False, longest)) == "deferred":
            self._tell_deferred(declared)
        else:
            self._awaited[group.id] = declared
        self.finished(group)

    def finished(self, group: OpenGroup) -> None:
        if group.id in self._awaited and not group.awaits_finish:
            self._settle(group)
        self._cut()

    def counted(self) -> None:
        self._changed.set()

    # Consequences.

    def _declare(self) -> None:
        """Declare the groups of prompts that are to start now. Raises: RequestError (503) if too many sessions are
        open."""
        while (position := self.progress.start()) is not None:
            prompt = self.prompts[position]
            request = self.terms.request(f"{self.id}-{len(self._declared)}", prompt.get("data"))
            group = self.sessions.declare(request, self.namespace, self)
            self._running[group.id] = Declared(position, group)
            self._declared.append(self._running[group.id])
            self._tell(
                DeclaredEvent(
                    prompt_id=self._prompt_id(position), group_id=group.id, to_begin=group.to_begin, prompt=prompt
                )
            )

    def _settle(self, group: OpenGroup) -> None:
        """Settle a returned group by the rewards that it has now."""
        declared = self._awaited.pop(group.id)
        said = [group.race.sessions[id].reward for id in group.selected]
        if self.progress.rewarded(declared.position, [reward for reward in said if reward is not None]):
            self._tell(FilteredEvent(prompt_id=self._prompt_id(declared.position)))
        else:
            self._tell(declared)

    def _cut(self) -> None:
        """Stop the other groups once enough are complete."""
        if self.progress.is_cut:
            for declared in list(self._running.values()):
                self._stop(declared)
        self._changed.set()

    def _stop(self, declared: Declared) -> None:
        position, group = declared
        del self._running[group.id]
        has_begun = bool(group.race.sessions)
        self.sessions.defer(group)
        if has_begun:
            self.progress.group_over(position, GroupEnd(False, True, 0))
            self._tell_deferred(declared)
        else:
            self.progress.withdraw(position)
            self._tell(UnstartedEvent(prompt_id=self._prompt_id(position), group_id=group.id))

    def _stop_awaiting(self) -> None:
        """Stop waiting for rewards from a harness that was silent for longer than a session may be."""
        for _, group in list(self._awaited.values()):
            if group.race.is_silent(self.sessions.now_s()):
                self._settle(group)
        self._cut()

    @property
    def _is_counted(self) -> bool:
        """True if all turns have ended."""
        return all(group.is_counted for _, group in self._declared)

    def _check_served(self) -> None:
        """Check that a harness has run sessions. Raises: RequestError (504), and then the round is interrupted."""
        groups = [group for _, group in self._declared]
        is_served = self.before or any(group.status == "complete" for group in groups)
        if is_served or not all(group.race.is_abandoned for group in groups):
            return
        number, idle_s = self.opened.number, self.terms.options.idle_timeout_s
        raise RequestError(
            f"no group of round {number} of run {self.run_id!r} is complete, and nobody has run a session of it for "
            f"{idle_s:g} s (idle_timeout_s): it is interrupted, and its prompts stay in it. Repeat its key, "
            f"{self.opened.key!r}, when the harness runs, or DELETE /v1/runs/{self.run_id}/rounds/{number} to put them "
            "back.",
            status=HTTPStatus.GATEWAY_TIMEOUT,
        )

    def _leave(self) -> None:
        """Stop all groups of a round that has no reader any more."""
        self._running.clear()
        for _, group in self._declared:
            self.sessions.defer(group)
            group.watcher = None

    def _tell_deferred(self, declared: Declared) -> None:
        position, group = declared
        reason = self.progress.reasons[position]
        self._tell(DeferredEvent(prompt_id=self._prompt_id(position), group_id=group.id, reason=reason))

    def _tell(self, event: SessionRoundEvent | Declared) -> None:
        self._told.append(event)

    def _prompt_id(self, position: int) -> str:
        return self.opened.all_entries[position].prompt_id

    # Answers.

    async def _returned(self, declared: Declared) -> ReturnedEvent:
        position, group = declared
        told = group.returned(self._prompt_id(position), self.prompts[position], self.sessions.now_s())
        await self._answered(position, told)
        if told.status == "complete" and self.ended is not None:
            self.ended.add(self.opened.all_entries[position].number, self._answers[position])
        return ReturnedEvent(**vars(told))

    async def _returned_before(self, position: int, group: PromptSessions) -> ReturnedEvent:
        longest = max(trajectory.num_tokens for trajectory in group.trajectories)
        self.progress.ended_before(position, GroupEnd(True, False, longest))
        self.progress.rewarded(position, ())  # else it would not have been returned
        await self._answered(position, group)
        return ReturnedEvent(**vars(group))

    async def _answered(self, position: int, group: PromptSessions) -> None:
        self._answers[position] = await encode(group, group.generated_tokens)

    def spent(self) -> Spent:
        generated = sum(session.num_tokens for _, group in self._declared for session in group.race.sessions.values())
        returned = sum(g.race.result.returned_tokens for position, g in self._declared if position in self._answers)
        generated += sum(group.generated_tokens for group in self.before.values())
        returned += sum(group.returned_tokens for group in self.before.values())
        return Spent(self._seconds, generated, returned)

    def parts(self, told: RoundSummary) -> list[bytes]:
        envelope = SessionRoundAnswer(**told.model_dump(), **self._envelope(), groups=[])
        return filled(envelope, "groups", [self._answers[position] for position in sorted(self._answers)])

    def done(self, told: RoundSummary) -> SessionRoundDoneEvent:
        return SessionRoundDoneEvent(**told.model_dump(), **self._envelope())

    def _envelope(self) -> dict[str, Any]:
        spent = self.spent()
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "generated_tokens": spent.generated_tokens,
            "returned_tokens": spent.returned_tokens,
            "seconds": spent.latency_s,
        }

"""A round of agents: one call of a user's function per session of every prompt.

Invariant: once the round has a result or fails, none of its calls runs on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
from pydantic import Discriminator, TypeAdapter

from vllm_rollout.background import cancel, cancelled
from vllm_rollout.kernel.client.body import PromptLike
from vllm_rollout.kernel.client.calls import EventsCall
from vllm_rollout.kernel.client.connection import INCOMPLETE, RolloutError, event_data, parse, transport_error
from vllm_rollout.kernel.http.answers import ErrorEvent
from vllm_rollout.parts.rounds.client import run_calls
from vllm_rollout.parts.rounds.client.run_calls import PATIENCE_S, new_key
from vllm_rollout.parts.rounds.http.answers import DeferredEvent, FilteredEvent
from vllm_rollout.parts.rounds.with_sessions.http.answers import (
    ReturnedEvent,
    SessionRoundDoneEvent,
    SessionRoundEvent,
    UnstartedEvent,
)
from vllm_rollout.parts.sessions.client.agent_group import AgentGroup, RunAgent, RunningGroup, Shared
from vllm_rollout.parts.sessions.client.agents import MAX_CONCURRENT
from vllm_rollout.parts.sessions.http.body import DeclaredEvent, SessionEvent

_EVENT: TypeAdapter[SessionRoundEvent] = TypeAdapter(Annotated[SessionRoundEvent, Discriminator("type")])


@dataclass(frozen=True, slots=True)
class AgentRound:
    """Result of one round."""

    groups: list[AgentGroup]
    """Groups that the round returns, as from `agents`. `position` counts within this round."""
    summary: SessionRoundDoneEvent
    """The round's kind, its deferred prompts, and what the run needs next."""


class RoundGroup(RunningGroup):
    """Runs the sessions of one prompt of a round, which declares the group and says when it is over."""

    async def run(self, to_begin: Iterable[str]) -> AgentGroup:
        """Run the group. The round passes events to `hear` and `returned`."""
        try:
            self._begin(to_begin)
            event: ReturnedEvent = await self._is_over
            await self._see_out([each.id for each in event.trajectories])
            return self.made(event, event.trajectories)
        finally:
            await self._left()

    def returned(self, event: ReturnedEvent) -> None:
        if not self._is_over.done():
            self._is_over.set_result(event)


class RunningRound:
    """Runs one round."""

    def __init__(self, its: Shared, call: EventsCall) -> None:
        self._its, self._call = its, call
        self._groups: dict[str, RoundGroup] = {}
        self._tasks: dict[str, asyncio.Task[AgentGroup]] = {}
        """Running groups by group id."""
        self._group_of: dict[str, str] = {}
        """Id of the last declared group, by prompt id."""
        self._ended: list[AgentGroup] = []
        """Groups that were over before the round was asked for, or asked for again."""

    @property
    def _num_groups(self) -> int:
        return len(self._groups) + len(self._ended)

    async def result(self) -> AgentRound:
        """Run the round. Raises: RolloutError, and whatever a function raised that is no Exception (such as
        SystemExit).
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                summary = await self._read(tasks)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await cancelled(self._its.calls)
        mine = [task.result() for task in self._tasks.values() if not task.cancelled()]
        return AgentRound([*self._ended, *mine], summary)

    async def _read(self, tasks: asyncio.TaskGroup) -> SessionRoundDoneEvent:
        response = await self._its.client._open("POST", self._call.path, self._call.body)
        summary = None
        try:
            async with aclosing(event_data(response)) as events:
                async for data in events:
                    event = parse(_EVENT, data)
                    if isinstance(event, SessionRoundDoneEvent):
                        summary = event
                    self._hear(event, tasks)
        except httpx.TransportError as error:
            raise transport_error(error, response.url) from error
        if summary is None:
            raise RolloutError(None, "the stream ended before its done event; the round is interrupted.", INCOMPLETE)
        return summary

    def _hear(self, event: SessionRoundEvent, tasks: asyncio.TaskGroup) -> None:
        match event:
            case ErrorEvent():
                raise RolloutError.from_body(event.error)
            case DeclaredEvent():
                group = RoundGroup(self._its, self._num_groups, event.prompt, event.group_id)
                self._groups[event.group_id] = group
                self._group_of[event.prompt_id] = event.group_id
                self._tasks[event.group_id] = tasks.create_task(group.run(event.to_begin))
            case SessionEvent():
                self._groups[event.group_id].hear(event)
            case ReturnedEvent() if event.group_id in self._groups:
                self._groups[event.group_id].returned(event)
            case ReturnedEvent():
                known = RoundGroup(self._its, self._num_groups, event.prompt, event.group_id)
                self._ended.append(known.made(event, event.trajectories))
            case DeferredEvent() | UnstartedEvent() if event.group_id in self._tasks:
                cancel(self._tasks[event.group_id])
            case FilteredEvent() if event.prompt_id in self._group_of:
                cancel(self._tasks[self._group_of[event.prompt_id]])


class AgentRounds:
    """The methods of a run whose rounds consist of sessions."""

    async def agent_rounds(
        self,
        /,
        prompts: Iterable[PromptLike],
        *,
        run: RunAgent,
        epoch: int | None = None,
        max_concurrent: int = MAX_CONCURRENT,
        patience_s: float = PATIENCE_S,
    ) -> AsyncGenerator[AgentRound, None]:
        """Like `rounds`, for a run created with `sessions`. `run` is called once per session, as by `client.agents`.
        Its call is cancelled once the session has lost, or its prompt is deferred.

        `session.prompt` is the prompt with its `id`. A deferred prompt comes in a later round, also after a restart of
        this process. max_concurrent: calls of `run` at the same time. The others wait.

        Leaving the generator early (`contextlib.aclosing`) cancels all calls. The round is interrupted and comes first
        the next time.

        Raises: RolloutError, 504 if no call has done anything for `idle_timeout_s` seconds.
        """

        its: Any = self  # an AsyncRun

        async def play(prompts: Iterable[PromptLike] = (), *, key: str | None = None, **options: Any) -> AgentRound:
            call = run_calls.agent_round(its.id, prompts, key=key or new_key(), **options)
            answer: AgentRound = await its._patiently(
                lambda: RunningRound(Shared(its._client, run, idle, max_concurrent), call).result(), patience_s
            )
            return answer

        idle = {"idle_timeout_s": (its.info.sessions or {}).get("idle_timeout_s")}
        async with aclosing(its._rounds(prompts, epoch, play)) as rounds:
            async for answer in rounds:
                yield answer

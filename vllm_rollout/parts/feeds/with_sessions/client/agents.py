"""Agents of a feed: one call of a user's function per session, in this process or in several.

Invariant: once the harness stops, none of its calls runs on.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from typing import Annotated, Any

import httpx
from pydantic import Discriminator, TypeAdapter

from vllm_rollout.background import begin, cancel, cancelled
from vllm_rollout.kernel.client.connection import POLL_INTERVAL_S, RolloutError, event_data, parse
from vllm_rollout.kernel.http.answers import ErrorEvent
from vllm_rollout.parts.feeds.with_sessions.http.answers import HarnessEvent, SessionFeedEvent
from vllm_rollout.parts.sessions.client.agent_group import RunAgent, RunningGroup, Shared
from vllm_rollout.parts.sessions.client.agent_session import AgentSession
from vllm_rollout.parts.sessions.client.agents import MAX_CONCURRENT
from vllm_rollout.parts.sessions.http.body import DeclaredEvent, GroupOverEvent

logger = logging.getLogger(__name__)

PATIENCE_S = 600.0
"""Seconds for which a harness asks for events of a server that does not answer."""
_EVENT: TypeAdapter[SessionFeedEvent | ErrorEvent] = TypeAdapter(
    Annotated[SessionFeedEvent | ErrorEvent, Discriminator("type")]
)


class FeedGroup(RunningGroup):
    """Runs the sessions of one group, which the feed has declared."""

    async def run(self, to_begin: Iterable[str], left_behind: Iterable[str] = ()) -> None:
        """Run the group. The harness passes events to `hear`. `left_behind`: sessions whose calls have ended without
        the server's knowledge. Others replace them.

        Raises: RolloutError, and what a function raised that is no Exception.
        """
        try:
            new = [*to_begin]
            for id in set(left_behind).difference(new):
                await self._make_void(id)
            self._begin(new)
            over: GroupOverEvent = await self._is_over
            await self._see_out(over.selected)
        finally:
            await self._left()

    @property
    def session_ids(self) -> list[str]:
        return [*self._sessions]

    async def _make_void(self, id: str) -> None:
        session = AgentSession(self._client, id, self._prompt, 0, self._its.calls)
        try:
            await self._end(session, None, void=True)
        except RolloutError as error:
            if error.status != HTTPStatus.NOT_FOUND:  # else the server does not know it any more
                raise


class _Harness:
    """Runs sessions of one feed."""

    def __init__(self, its: Shared, feed_id: str) -> None:
        self._its, self._path = its, f"/v1/feeds/{feed_id}/events?harness={uuid.uuid4().hex}"
        self._groups: dict[str, FeedGroup] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._left_behind: dict[str, list[str]] = {}
        """Sessions of groups that begin again, by group."""
        self._reading: asyncio.Task[None] | None = None
        """Reads the stream of events."""
        self._heard_s: float | None = None
        """Time of the last event, in monotonic seconds."""
        self._end = asyncio.get_running_loop().create_future()
        """Gets an exception that is meant for the whole program."""

    async def run(self, patience_s: float) -> None:
        """Run the sessions until the feed is deleted. Raises: RolloutError, and as `FeedGroup.run`."""
        events = asyncio.create_task(self._listen(patience_s))
        try:
            await asyncio.wait({events, self._end}, return_when=asyncio.FIRST_COMPLETED)
            (self._end if self._end.done() else events).result()
        finally:
            await cancelled([events, *self._tasks.values()])
            await cancelled(self._its.calls)

    async def _listen(self, patience_s: float) -> None:
        """Follow the events. A stream that breaks is opened again, and repeats what matters now."""
        began_s = time.monotonic()
        while True:
            self._reading = begin(self._read())
            try:
                await asyncio.wait([self._reading])
            finally:
                await cancelled([self._reading])
            error = None if self._reading.cancelled() else self._reading.exception()
            status = getattr(error, "status", None)
            if status == HTTPStatus.NOT_FOUND and self._heard_s is not None:
                return
            may_pass = isinstance(error, httpx.TransportError) or status in (None, HTTPStatus.SERVICE_UNAVAILABLE)
            if error is not None and (not may_pass or time.monotonic() - (self._heard_s or began_s) > patience_s):
                raise error
            await self._its.client._sleep(POLL_INTERVAL_S)

    async def _read(self) -> None:
        response = await self._its.client._open("GET", self._path)
        async with aclosing(event_data(response)) as each:
            async for data in each:
                event = parse(_EVENT, data)
                if isinstance(event, ErrorEvent):
                    raise RolloutError.from_body(event.error)
                self._heard_s = time.monotonic()
                self._hear(event)

    def _hear(self, event: SessionFeedEvent) -> None:
        if isinstance(event, HarnessEvent):
            for id in self._tasks.keys() - event.groups:
                cancel(self._tasks[id])
            self._left_behind = {id: its for id, its in self._left_behind.items() if id in event.groups}
        elif isinstance(event, DeclaredEvent):
            if event.group_id not in self._groups:
                self._declared(event)
        elif (group := self._groups.get(event.group_id)) is not None:
            group.hear(event)

    def _declared(self, event: DeclaredEvent) -> None:
        id = event.group_id
        group = self._groups[id] = FeedGroup(self._its, 0, event.prompt, id)  # a feed's groups have no position
        left_behind = self._left_behind.pop(id, [])
        task = self._tasks[id] = begin(group.run(event.to_begin, left_behind))
        task.add_done_callback(lambda task: self._ended(id, task, left_behind))

    def _ended(self, id: str, task: asyncio.Task[None], left_behind: Iterable[str]) -> None:
        group = self._groups.pop(id)
        del self._tasks[id]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):  # its feed declares it again if it is not over
            self._left_behind[id] = [*left_behind, *group.session_ids]
            logger.warning("group %s of a feed begins again: %r", id, error)
            if self._reading is not None:
                self._reading.cancel()
        elif error is not None and not self._end.done():
            self._end.set_exception(error)


class AgentFeed:
    """The methods of a feed whose candidates are sessions."""

    async def run_agents(
        self, run: RunAgent, *, max_concurrent: int = MAX_CONCURRENT, patience_s: float = PATIENCE_S
    ) -> None:
        """Call `run` once for each session of the feed, as `client.agents` does, until the feed is deleted.

        A session whose call is cancelled has lost, or its group was stopped. `session.prompt` is the prompt with its
        `id`. Several processes may do this for one feed, and share its groups. A process that is away for 30 seconds
        loses its groups, whose prompts run again.

        Args:
            max_concurrent: calls of `run` at the same time. The others wait.
            patience_s: seconds for which a server that does not answer is asked again.

        Raises: RolloutError, 409 for a feed without sessions. ValueError if `max_concurrent` is less than 1.
        """
        its: Any = self  # an AsyncFeed
        body = {"idle_timeout_s": (its.info.sessions or {}).get("idle_timeout_s")}
        await _Harness(Shared(its._client, run, body, max_concurrent), its.id).run(patience_s)

    @asynccontextmanager
    async def agents(
        self, run: RunAgent, *, max_concurrent: int = MAX_CONCURRENT, patience_s: float = PATIENCE_S
    ) -> AsyncIterator[None]:
        """Run agents beside a block, as `run_agents` does. The end of the block cancels them.

        Raises: as `run_agents`, which ends the block.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                agents = tasks.create_task(self.run_agents(run, max_concurrent=max_concurrent, patience_s=patience_s))
                yield
                agents.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

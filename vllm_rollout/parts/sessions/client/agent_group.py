"""Sessions of one prompt: one call of a user's function per session, cancelled once the session has lost.

Invariant: every group has a result, whatever its functions do. The result carries the exceptions that they raised.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from operator import attrgetter
from typing import Annotated, Any, Protocol

import httpx
from pydantic import Discriminator, TypeAdapter

from vllm_rollout.background import begin, cancel, cancelled
from vllm_rollout.kernel.client.calls import Call, typed
from vllm_rollout.kernel.client.connection import POLL_INTERVAL_S, RolloutError, event_data, parse
from vllm_rollout.kernel.client.sender import Sender
from vllm_rollout.kernel.rules.types import GroupStatus, SessionState
from vllm_rollout.parts.sessions.client.agent_session import (
    UNWANTED,
    AgentSession,
    SessionLost,
    Void,
    as_reward,
)
from vllm_rollout.parts.sessions.http.body import (
    GroupOverEvent,
    SegmentAnswer,
    SessionAnswer,
    SessionEvent,
    SessionGroupAnswer,
    TrajectoryAnswer,
    TurnAnswer,
)
from vllm_rollout.parts.sessions.rules import SessionLimits

logger = logging.getLogger(__name__)

_EVENT: TypeAdapter[SessionEvent | GroupOverEvent] = TypeAdapter(
    Annotated[SessionEvent | GroupOverEvent, Discriminator("type")]
)
RunAgent = Callable[[AgentSession], Awaitable[float | None]]


@dataclass(frozen=True, slots=True)
class AgentResult:
    """Result of one session."""

    session_id: str
    number: int
    state: SessionState
    reward: float | None
    num_turns: int
    num_tokens: int
    """Tokens that the policy generated."""
    messages: list[dict[str, Any]] | None
    """Messages of the session's last `chat` call with its answer appended. None if the function did not use `chat`."""
    turns: list[TurnAnswer]
    """Turns, each with how it continued the turn before. Empty for a session that the group did not return."""
    segments: list[SegmentAnswer] | None
    """Token ids as the engine saw them, with masks and log probabilities. None for a session that the group did not
    return.
    """
    error: Exception | None
    """Exception that the function raised, or the error that kept the session from finishing. None: no error."""


@dataclass(frozen=True, slots=True)
class AgentGroup:
    """Result of one prompt."""

    prompt: Any
    position: int
    """Position of the prompt in `prompts`, from 0."""
    group_id: str
    status: GroupStatus
    reason: str | None
    """Reason if the group is not complete."""
    trajectories: list[AgentResult]
    """Sessions that the group returns: `group_size` of them if it is complete."""
    others: list[AgentResult]
    generated_tokens: int
    returned_tokens: int
    seconds: float


class EndedGroup(Protocol):
    """The server's answer about an ended group: of a group by itself, or of one in a round."""

    status: Any
    reason: str | None
    sessions: list[SessionAnswer]
    generated_tokens: int
    returned_tokens: int
    seconds: float


class Shared:
    """State shared by the groups of one `agents` call."""

    def __init__(self, client: Sender, run: RunAgent, body: Mapping[str, Any], max_concurrent: int) -> None:
        if max_concurrent < 1:
            raise ValueError(f"max_concurrent must be 1 or more, got {max_concurrent}.")
        self.client, self.run, self.body = client, run, body
        self.num_sessions: int = body.get("group_size", 1) + body.get("redundancy", 0)
        self.places = asyncio.Semaphore(max_concurrent)
        self.calls: set[asyncio.Task[Any]] = set()
        """Running calls of the user's function, and running turns."""


class RunningGroup:
    """Runs the sessions of one prompt."""

    def __init__(self, its: Shared, position: int, prompt: Any, id: str | None = None) -> None:
        """`id`: the id of a group that is already declared. None: a new id."""
        self._its, self._client = its, its.client
        self._position, self._prompt = position, prompt
        self._id = id or f"agents-{uuid.uuid4().hex}"
        self._path = f"/v1/groups/{self._id}"
        self._read = Call("GET", self._path, typed(SessionGroupAnswer))
        self._sessions: dict[str, AgentSession] = {}
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._errors: dict[str, Exception] = {}
        self.has_begun = asyncio.Event()
        """Set once the group's sessions wait for places."""
        self._is_over = asyncio.get_running_loop().create_future()
        """Future of the event that ends the group."""

    async def result(self) -> AgentGroup:
        """Declare the group, run it, and read what it returns. The caller holds a place for its first session.

        Raises: RolloutError.
        """
        try:
            async with self._its.client._placed(self._its.num_sessions) as self._client:
                return await self._result()
        finally:
            self.has_begun.set()

    async def _result(self) -> AgentGroup:
        listening = None
        try:
            try:
                body = {**self._its.body, "id": self._id}
                if callable(data := body.get("data")):
                    body["data"] = data(self._prompt)
                self._begin((await self._declared(body)).to_begin)
            finally:
                self._its.places.release()  # for its first session
                self.has_begun.set()
            listening = asyncio.create_task(self._listen())
            over: GroupOverEvent = await self._is_over
            return await self._returned(over)
        finally:
            if listening is not None:
                await cancelled([listening])
            if await self._left():
                with suppress(RolloutError):  # the group or the server does not exist
                    await self._client.send(Call("DELETE", self._path, lambda _: None))

    async def _declared(self, body: Mapping[str, Any]) -> SessionGroupAnswer:
        try:
            return await self._client.send(Call("POST", "/v1/groups", typed(SessionGroupAnswer), body))
        except RolloutError as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            return await self._client.send(self._read)  # the id is unique, so an earlier answer was lost

    async def _left(self) -> bool:
        """If the group stopped without a result, cancel its functions and return True."""
        is_left = not self._is_over.done() or self._is_over.cancelled() or self._is_over.exception() is not None
        if is_left:
            await cancelled([*self._calls.values(), *self._turns])
        return is_left

    @property
    def _turns(self) -> list[asyncio.Task[Any]]:
        """Turns that are running."""
        return [turn for session in self._sessions.values() for turn in session.turns]

    def _begin(self, ids: Iterable[str]) -> None:
        for id in ids:
            if id not in self._sessions:
                session = AgentSession(self._client, id, self._prompt, _number(id), self._its.calls)
                self._sessions[id], self._calls[id] = session, begin(self._call(session), self._its.calls)

    async def _call(self, session: AgentSession) -> None:
        """Call the user's function, then finish its session or make it void."""
        async with self._its.places:
            void, reward = False, None
            try:
                reward = await self._its.run(session)
                reward = None if reward is None else as_reward(reward)
            except SessionLost:
                pass  # or a limit ended the session, which may still be graded
            except asyncio.CancelledError:
                if self._calls[session.id].cancelling():
                    raise
                self._fail(session, RuntimeError("its function was cancelled by itself"))
                void = True
            except Exception as error:
                self._fail(session, error)
                void = True
            except BaseException as error:  # such as SystemExit: it is meant for the whole program
                if not self._is_over.done():
                    self._is_over.set_exception(error)
                return
            if session.is_ending or self._calls[session.id].cancelling():
                return
            try:
                await cancelled(session.turns)  # turns that the function left behind
                await self._end(session, reward, void)
            except Exception as error:  # whatever it is, its group must not wait for ever
                if self._is_over.done():
                    self._errors.setdefault(session.id, error)
                else:
                    self._is_over.set_exception(error)

    def _fail(self, session: AgentSession, error: Exception) -> None:
        self._errors[session.id] = error
        if not isinstance(error, Void):
            logger.warning("session %s is void, its function raised %r", session.id, error)

    async def _end(self, session: AgentSession, reward: float | None, void: bool) -> None:
        """Finish the session, or make it void. Sessions that replace it come as events."""
        try:
            await (session.end({"void": True}) if void else session.finish(reward))
        except RolloutError as error:
            if error.status == HTTPStatus.CONFLICT:  # the function ended it over a client of its own
                return
            if error.status != HTTPStatus.NOT_FOUND or void:
                raise
            self._errors[session.id] = error  # the session had no turn
            await session.end({"void": True})

    async def _listen(self) -> None:
        """Follow the events of the group's sessions. A stream that breaks is opened again and repeats past events."""
        try:
            while not self._is_over.done():
                with suppress(httpx.TransportError):
                    await self._read_events()
                if not self._is_over.done():
                    await self._client._sleep(POLL_INTERVAL_S)
        except Exception as error:  # whatever it is, its group must not wait for ever
            if not self._is_over.done():
                self._is_over.set_exception(error)

    async def _read_events(self) -> None:
        response = await self._client._open("GET", f"/v1/sessions/events?group={self._id}")
        async with aclosing(event_data(response)) as events:
            async for data in events:
                self.hear(parse(_EVENT, data))

    def hear(self, event: SessionEvent | GroupOverEvent) -> None:
        if isinstance(event, GroupOverEvent):
            if not self._is_over.done():
                self._is_over.set_result(event)
        elif event.state == "wanted":
            self._begin([event.session_id])
        elif event.state in UNWANTED and event.session_id in self._calls:
            self._stop(event.session_id)

    def _stop(self, id: str) -> None:
        """Mark the session as lost and cancel its function, unless the function is already finishing the session."""
        self._sessions[id].has_lost = True
        if not self._sessions[id].is_ending:
            cancel(self._calls[id])

    async def _returned(self, over: GroupOverEvent) -> AgentGroup:
        await self._see_out(over.selected)
        answer = await self._client.send(self._read)
        return self.made(answer, await asyncio.gather(*(self._sessions[id].read() for id in over.selected)))

    async def _see_out(self, selected: Sequence[str]) -> None:
        """Wait until the functions of `selected` sessions have ended, because they bring rewards. Other functions are
        cancelled. The wait lasts at most `idle_timeout_s`.
        """
        for id in self._calls.keys() - selected:
            self._stop(id)
        lasting = {self._calls[id]: id for id in selected if id in self._calls} | dict.fromkeys(self._turns, "")
        if lasting:
            timeout_s = self._its.body.get("idle_timeout_s") or SessionLimits().idle_timeout_s
            _, late = await asyncio.wait(lasting, timeout=timeout_s)
            for task in late:
                if lasting[task]:
                    error = TimeoutError(f"its function went on for {timeout_s:g} s when its group was over")
                    self._errors.setdefault(lasting[task], error)
            await cancelled(late)

    def made(self, answer: EndedGroup, trajectories: Collection[TrajectoryAnswer]) -> AgentGroup:
        """Result of an ended group: the server's answer together with the results of the functions."""
        known, selected = {each.id: each for each in answer.sessions}, {each.id for each in trajectories}
        others = [self._told(known.get(id) or _unbegun(id)) for id in {**self._sessions, **known} if id not in selected]
        assert answer.status != "running"
        return AgentGroup(
            prompt=self._prompt,
            position=self._position,
            group_id=self._id,
            status=answer.status,
            reason=answer.reason,
            trajectories=sorted((self._told(each) for each in trajectories), key=attrgetter("number")),
            others=others,
            generated_tokens=answer.generated_tokens,
            returned_tokens=answer.returned_tokens,
            seconds=answer.seconds,
        )

    def _told(self, answer: SessionAnswer) -> AgentResult:
        session = self._sessions.get(answer.id)  # None: another process ran it
        trajectory = answer if isinstance(answer, TrajectoryAnswer) else None
        return AgentResult(
            session_id=answer.id,
            number=_number(answer.id),
            state=answer.state,
            reward=answer.reward,
            num_turns=answer.num_turns,
            num_tokens=answer.num_tokens,
            messages=None if session is None else session.messages,
            turns=[] if trajectory is None else trajectory.turns,
            segments=None if trajectory is None else trajectory.segments,
            error=self._errors.get(answer.id),
        )


def _number(id: str) -> int:
    """Position of a declared session among those of its group, from 0."""
    return int(id.rpartition(".")[2])


def _unbegun(id: str) -> SessionAnswer:
    """Answer for a session that lost before its first turn."""
    return SessionAnswer(id=id, state="surplus", ended_by="race", num_turns=0, num_tokens=0, reward=None)

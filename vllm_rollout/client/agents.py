"""Groups of agents from Python: a call of a user's function per session, cancelled when its session has lost.

Invariant: no call outlives the generator, and whatever a function raises is told in its group's result.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from operator import attrgetter
from typing import Annotated, Any, Protocol, TypedDict, TypeVar
from urllib.parse import quote

import httpx
from pydantic import Discriminator, TypeAdapter
from typing_extensions import Unpack

from vllm_rollout.client.body import option_fields, takes_options
from vllm_rollout.client.calls import Call, typed
from vllm_rollout.client.connection import POLL_INTERVAL_S, EventData, RolloutError, parse, raise_for_error
from vllm_rollout.group.racing.sessions import SessionLimits, SessionState
from vllm_rollout.group.types import GroupStatus
from vllm_rollout.server.sessions.body import (
    FinishAnswer,
    GroupOverEvent,
    SegmentAnswer,
    SessionAnswer,
    SessionEvent,
    SessionGroupAnswer,
    SessionGroupRequest,
    TrajectoryAnswer,
    TurnAnswer,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_CONCURRENT = 512
"""Sessions at once by default. Each has a connection while it has a turn, and each group one for its events."""
AGAIN_S = 0.2
"""A finish that overtook the end of a turn, such as one whose call was cancelled, is sent again after so long."""
OPEN = frozenset({"turn", "between_turns"})
UNWANTED = frozenset({"surplus", "pruned", "deferred", "void"})
"""States of sessions whose function is to stop."""

_EVENT: TypeAdapter[SessionEvent | GroupOverEvent] = TypeAdapter(
    Annotated[SessionEvent | GroupOverEvent, Discriminator("type")]
)


class AgentOptions(TypedDict, total=False):
    """Options of `agents`, in the words of `POST /v1/groups`."""

    early_stop: bool
    selection: str
    until: str
    max_sessions: int | None
    pruning: Mapping[str, Any] | None
    pruning_turn: int
    audit_ratio: float | None
    reward: str | Mapping[str, Any] | None
    data: Any
    max_turns: int | None
    max_tokens: int | None
    idle_timeout_s: float | None
    cut_turn: str | None
    history: str | None


class SessionLost(Exception):
    """Nobody needs this session's turns any more: let it pass, so that the function ends."""


class Void(Exception):
    """Raise it where a tool or a sandbox failed: the session counts for nothing, and another one takes its place."""


class Sender(Protocol):
    """As much of an `AsyncRolloutClient` as agents need."""

    base_url: str
    key_headers: dict[str, str]

    async def send(self, call: Call[T]) -> T: ...

    async def _open(self, method: str, path: str) -> httpx.Response: ...

    async def _sleep(self, seconds: float) -> None: ...


class AgentSession:
    """One conversation: what a user's function is called with."""

    def __init__(self, client: Sender, id: str, prompt: Any, number: int) -> None:
        self._client = client
        self.id = id
        self.prompt = prompt
        """The element of `prompts`."""
        self.number = number
        """Among the sessions of its group, from 0."""
        self.messages: list[dict[str, Any]] | None = None
        """Of the last `chat`, and its answer; None before the first."""
        self.is_ending = False
        """It was finished, or is being."""
        self.has_lost = False
        self.turns: set[asyncio.Task[dict[str, Any]]] = set()
        """On their way."""

    @property
    def base_url(self) -> str:
        """For an OpenAI client of any kind, with `headers`."""
        return f"{self._client.base_url}/v1"

    @property
    def headers(self) -> dict[str, str]:
        """That make a request a turn of this session."""
        return {"X-Session-ID": self.id, **self._client.key_headers}

    async def chat(self, messages: Iterable[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """One turn by POST /v1/chat/completions, with any of its `fields`; the parsed answer.

        Asks for log probabilities, which the trajectory holds, unless `logprobs=False`.

        Raises: SessionLost; RolloutError with the server's words, such as a prompt that is too long.
        """
        sent = [dict(message) for message in messages]
        answer = await self._turn("chat/completions", {"messages": sent, "logprobs": True, **fields})
        self.messages = [*sent, answer["choices"][0]["message"]]
        return answer

    async def complete(self, prompt: str | Sequence[int], **fields: Any) -> dict[str, Any]:
        """One turn by POST /v1/completions, as `chat`. Log probabilities: unless `logprobs=None`."""
        prompt = prompt if isinstance(prompt, str) else list(prompt)
        return await self._turn("completions", {"prompt": prompt, "logprobs": 0, **fields})

    async def finish(self, reward: float | None = None) -> FinishAnswer:
        """The session is over. Where a function does not say so, its return does.

        None: the group's reward function grades it, if it has one. Raises: RolloutError, 409 for a second time.
        """
        return await self._finish({} if reward is None else {"reward": as_reward(reward)})

    async def _finish(self, body: Mapping[str, Any]) -> FinishAnswer:
        call = Call("POST", f"/v1/sessions/{quote(self.id, safe='')}/finish", typed(FinishAnswer), body)
        self.is_ending = True
        while True:
            try:
                answer = await self._client.send(call)
            except RolloutError as error:
                if error.status != HTTPStatus.CONFLICT or (await self.read()).state not in OPEN:
                    self.is_ending = False
                    raise
                await self._client._sleep(AGAIN_S)
            else:
                return answer

    async def read(self) -> TrajectoryAnswer:
        """What it has become so far. Raises: RolloutError, 404 before its first turn."""
        return await self._client.send(Call("GET", f"/v1/sessions/{quote(self.id, safe='')}", typed(TrajectoryAnswer)))

    async def _turn(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if body.get("stream"):
            raise TypeError(
                "stream: a turn's answer is whole here. Stream with a client at `base_url`, with `headers`."
            )
        call = Call("POST", f"/v1/{path}", typed(dict[str, Any]), body, headers=self.headers)
        turn = asyncio.create_task(self._client.send(call))
        self.turns.add(turn)
        turn.add_done_callback(self.turns.discard)
        try:
            answer = await asyncio.shield(turn)
        except asyncio.CancelledError:
            if not self.has_lost:  # else the server ends the turn, and counts its tokens
                await _cancelled([turn])
            raise
        choice = answer["choices"][0]
        if choice["finish_reason"] == "abort" and choice.get("stop_reason") in UNWANTED:
            raise SessionLost(f"session {self.id} of prompt {self.prompt!r:.80}: {choice['stop_reason']}")
        return answer


RunAgent = Callable[[AgentSession], Awaitable[float | None]]


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What became of one session."""

    session_id: str
    number: int
    state: SessionState
    reward: float | None
    num_turns: int
    num_tokens: int
    """That the policy generated."""
    messages: list[dict[str, Any]] | None
    """Of its last `chat`, and the answer; None where the function used another way."""
    turns: list[TurnAnswer]
    """With how each went on from the one before; empty where the group did not return it."""
    segments: list[SegmentAnswer] | None
    """Tokens as the engine saw them, with masks and log probabilities; None where the group did not return it."""
    error: Exception | None
    """What its function raised."""


@dataclass(frozen=True, slots=True)
class AgentGroup:
    """What became of one prompt."""

    prompt: Any
    position: int
    """In `prompts`."""
    group_id: str
    status: GroupStatus
    reason: str | None
    """Why it is not complete."""
    trajectories: list[AgentResult]
    """That it returns: `group_size` of them if it is complete."""
    others: list[AgentResult]
    generated_tokens: int
    returned_tokens: int
    seconds: float


def as_reward(value: Any) -> float:
    """Raises: ValueError, TypeError."""
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"a reward must be a finite number, got {reward}. Return None for none, or raise Void.")
    return reward


class Agents:
    """One call of `agents`."""

    def __init__(self, client: Sender, run: RunAgent, body: Mapping[str, Any], max_concurrent: int) -> None:
        self.client, self.run, self.body = client, run, body
        self.places = asyncio.Semaphore(max_concurrent)
        self.calls: set[asyncio.Task[None]] = set()
        """Of the user's function, that have not ended."""

    async def groups(self, prompts: Iterable[Any]) -> AsyncGenerator[AgentGroup, None]:
        """Each when it is over. A group is declared when there is a place for one of its sessions."""
        waiting: Iterator[tuple[int, Any]] = enumerate(prompts)
        running: set[asyncio.Task[Any]] = set()
        place: asyncio.Task[Any] | None = asyncio.create_task(self.places.acquire())
        try:
            while place is not None or running:
                over, _ = await asyncio.wait(
                    {*running, *([] if place is None else [place])}, return_when=asyncio.FIRST_COMPLETED
                )
                if place in over:
                    over.remove(place)
                    position, prompt = next(waiting, (None, None))
                    if position is None:
                        self.places.release()
                        place = None
                    else:
                        group = _Group(self, position, prompt)
                        running.add(asyncio.create_task(group.result()))
                        place = asyncio.create_task(self._place_after(group))
                for task in over:
                    running.remove(task)
                    yield task.result()
        finally:
            await _cancelled([*running, *([] if place is None else [place])])
            await _cancelled(self.calls)

    async def _place_after(self, group: _Group) -> None:
        """One that none of that group's sessions wants."""
        await group.has_begun.wait()
        await self.places.acquire()


class _Group:
    """One prompt's sessions."""

    def __init__(self, agents: Agents, position: int, prompt: Any) -> None:
        self._agents, self._client = agents, agents.client
        self._position, self._prompt = position, prompt
        self._id = f"agents-{uuid.uuid4().hex}"
        self._path = f"/v1/groups/{self._id}"
        self._sessions: dict[str, AgentSession] = {}
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._errors: dict[str, Exception] = {}
        self.has_begun = asyncio.Event()
        """Its sessions wait for places."""
        self._is_over = asyncio.get_running_loop().create_future()
        """With the event that says so."""

    async def result(self) -> AgentGroup:
        """Declares it, runs it, and reads what it returns. Its first session has a place. Raises: RolloutError."""
        listening = None
        try:
            try:
                body = {**self._agents.body, "id": self._id}
                if callable(data := body.get("data")):
                    body["data"] = data(self._prompt)
                declared = await self._client.send(Call("POST", "/v1/groups", typed(SessionGroupAnswer), body))
                self._begin(declared.to_begin)
            finally:
                self._agents.places.release()  # which its first session takes
                self.has_begun.set()
            listening = asyncio.create_task(self._listen())
            over: GroupOverEvent = await self._is_over
            return await self._returned(over)
        finally:
            if listening is not None:
                await _cancelled([listening])
            for call in [*self._calls.values(), *self._turns]:
                call.cancel()
            if not self._is_over.done() or self._is_over.cancelled() or self._is_over.exception():
                await _cancelled(self._calls.values())
                with suppress(RolloutError):  # there is none, or no server
                    await self._client.send(Call("DELETE", self._path, lambda _: None))

    @property
    def _turns(self) -> list[asyncio.Task[Any]]:
        """On their way."""
        return [turn for session in self._sessions.values() for turn in session.turns]

    def _begin(self, ids: Iterable[str]) -> None:
        for id in ids:
            if id not in self._sessions and not self._is_over.done():
                session = AgentSession(self._client, id, self._prompt, len(self._sessions))
                call = asyncio.create_task(self._call(session))
                self._sessions[id], self._calls[id] = session, call
                self._agents.calls.add(call)
                call.add_done_callback(self._agents.calls.discard)

    async def _call(self, session: AgentSession) -> None:
        """The user's function, and what follows from how it ends."""
        async with self._agents.places:
            void, reward = False, None
            try:
                reward = await self._agents.run(session)
                reward = None if reward is None else as_reward(reward)
            except SessionLost:
                pass  # or it was cut by a limit, and may be graded
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
                await _cancelled(session.turns)  # that it left behind
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
        try:
            answer = await (session._finish({"void": True}) if void else session.finish(reward))
        except RolloutError as error:
            if error.status == HTTPStatus.CONFLICT:  # by itself, over a client of its own
                return
            if error.status != HTTPStatus.NOT_FOUND or void:
                raise
            self._errors[session.id] = error  # it never took a turn
            answer = await session._finish({"void": True})
        self._begin(answer.wanted)

    async def _listen(self) -> None:
        """What becomes of its sessions. A stream that breaks is opened again, and begins with what has happened."""
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
        try:
            if response.is_error:
                await response.aread()
                raise_for_error(response)
            reader = EventData()
            async for chunk in response.aiter_bytes():
                for data in reader.feed(chunk):
                    self._hear(parse(_EVENT, data))
        finally:
            await response.aclose()

    def _hear(self, event: SessionEvent | GroupOverEvent) -> None:
        if isinstance(event, GroupOverEvent):
            if not self._is_over.done():
                self._is_over.set_result(event)
        elif event.state == "wanted":
            self._begin([event.session_id])
        elif event.state in UNWANTED and event.session_id in self._calls:
            self._stop(event.session_id)

    def _stop(self, id: str) -> None:
        """Cancels its function. One that has ended is left to say so."""
        self._sessions[id].has_lost = True
        if not self._sessions[id].is_ending:
            self._calls[id].cancel()

    async def _returned(self, over: GroupOverEvent) -> AgentGroup:
        """Once the functions of what it returns have ended, which bring rewards; they may take as long as a session may
        be silent."""
        for id in self._calls.keys() - over.selected:
            self._stop(id)
        lasting = {self._calls[id]: id for id in over.selected} | dict.fromkeys(self._turns, "")
        if lasting:
            timeout_s = self._agents.body.get("idle_timeout_s") or SessionLimits().idle_timeout_s
            _, late = await asyncio.wait(lasting, timeout=timeout_s)
            for task in late:
                if lasting[task]:
                    error = TimeoutError(f"its function went on for {timeout_s:g} s when its group was over")
                    self._errors.setdefault(lasting[task], error)
            await _cancelled(late)
        answer = await self._client.send(self._read())
        read = await asyncio.gather(*(self._sessions[id].read() for id in over.selected))
        known = {each.id: each for each in answer.sessions}
        others = [self._told(known.get(id) or _unbegun(id)) for id in self._sessions if id not in over.selected]
        return AgentGroup(
            prompt=self._prompt,
            position=self._position,
            group_id=self._id,
            status=over.status,
            reason=answer.reason,
            trajectories=sorted((self._told(each) for each in read), key=attrgetter("number")),
            others=others,
            generated_tokens=answer.generated_tokens,
            returned_tokens=answer.returned_tokens,
            seconds=answer.seconds,
        )

    def _told(self, answer: SessionAnswer) -> AgentResult:
        session = self._sessions[answer.id]
        trajectory = answer if isinstance(answer, TrajectoryAnswer) else None
        return AgentResult(
            session_id=answer.id,
            number=session.number,
            state=answer.state,
            reward=answer.reward,
            num_turns=answer.num_turns,
            num_tokens=answer.num_tokens,
            messages=session.messages,
            turns=[] if trajectory is None else trajectory.turns,
            segments=None if trajectory is None else trajectory.segments,
            error=self._errors.get(answer.id),
        )

    def _read(self) -> Call[SessionGroupAnswer]:
        return Call("GET", self._path, typed(SessionGroupAnswer))


def _unbegun(id: str) -> SessionAnswer:
    """One that lost before its first turn."""
    return SessionAnswer(id=id, state="surplus", ended_by="race", num_turns=0, num_tokens=0, reward=None)


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Once they have ended; what they raise is of no interest any more."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@takes_options(AgentOptions, SessionGroupRequest)
def agents(
    client: Sender,
    prompts: Iterable[Any],
    group_size: int,
    redundancy: int = 0,
    *,
    run: RunAgent,
    max_concurrent: int = MAX_CONCURRENT,
    **options: Unpack[AgentOptions],
) -> AsyncGenerator[AgentGroup, None]:
    """Groups of sessions, one for each of `prompts`, which are values of any kind; each result when it is over.

    `run` is an async function. It is called with an `AgentSession` for each of the `group_size + redundancy` sessions
    of a prompt, and for those that are wanted later; what it returns is the session's reward, None for none or for the
    server's `reward`. When its session has lost it is cancelled: it sees an asyncio.CancelledError, so that its
    `finally` blocks close sandboxes. Raising `Void`, or anything else, makes the session void; what was raised is the
    `error` of its result, and a warning if it is not `Void`.

    `max_concurrent`: calls of `run` at once. A group is declared when there is a place for one of its sessions.
    `data` may be a function of the prompt.

    Leaving the generator early (`contextlib.aclosing`) cancels all calls and deletes groups that are not over. There is
    no such method of the sync client, whose caller has no event loop: `asyncio.run` a function that uses this one.

    Raises: RolloutError when the server refuses a group, or cannot be reached.
    """
    if isinstance(prompts, str | Mapping):
        raise TypeError(f"prompts must be a list of prompts, got one {type(prompts).__name__}. Write [prompt].")
    if max_concurrent < 1:
        raise ValueError(f"max_concurrent must be 1 or more, got {max_concurrent}.")
    body = {"group_size": group_size, "redundancy": redundancy, **option_fields(options, AgentOptions)}
    return Agents(client, run, body, max_concurrent).groups(prompts)

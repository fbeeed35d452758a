"""Clients of the server's endpoints, async and sync. Invariant: importing this needs neither vllm nor torch.

`calls.py` describes requests and the reading of answers. `sender.py` sends them. The sync client is the async client
over a transport that blocks (`blocking.py`).
"""

from __future__ import annotations

import inspect
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from functools import update_wrapper, wraps
from inspect import Parameter, signature
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, get_args, get_type_hints

import httpx
from typing_extensions import Unpack

from vllm_rollout.kernel.client import calls
from vllm_rollout.kernel.client.blocking import BlockingTransport, LoopThread, blocking, blocking_generator, finished
from vllm_rollout.kernel.client.body import PromptLike, Redundancy, RolloutOptions, Selection, rollout_body
from vllm_rollout.kernel.client.calls import Call, EventsCall, QualityHead
from vllm_rollout.kernel.client.connection import (
    DEFAULT_URL,
    HEALTH_TIMEOUT_S,
    LIMITS,
    RolloutError,
    is_healthy,
    poll_s,
)
from vllm_rollout.kernel.client.sender import Sender
from vllm_rollout.kernel.client.weights import GivenWeights, give_weights
from vllm_rollout.kernel.http.answers import Event
from vllm_rollout.kernel.http.protocol import Pruning
from vllm_rollout.parts.fleet.fleet import Fleet
from vllm_rollout.parts.rounds.client import run_calls
from vllm_rollout.parts.rounds.client.run import AsyncRun, Run
from vllm_rollout.parts.rounds.client.run_calls import RunOptions
from vllm_rollout.parts.rounds.with_sessions.client.agent_rounds import AgentRound
from vllm_rollout.parts.sessions.client.agent_group import AgentGroup
from vllm_rollout.parts.sessions.client.agent_session import AgentSession, SessionLost, Void
from vllm_rollout.parts.sessions.client.agents import agents

__all__ = [
    "AgentGroup",
    "AgentRound",
    "AgentSession",
    "AsyncRolloutClient",
    "AsyncRun",
    "GivenWeights",
    "PromptLike",
    "Pruning",
    "QualityHead",
    "Redundancy",
    "RolloutClient",
    "RolloutError",
    "RolloutOptions",
    "Run",
    "Selection",
    "SessionLost",
    "Void",
    "rollout_body",
]

T = TypeVar("T")
P = ParamSpec("P")
Method = TypeVar("Method", bound=Callable[..., Any])


def _described_by(describe: Callable[..., Any], returns: object) -> Callable[[Method], Method]:
    """Decorator: gives a method the name, docstring and signature of the call's description."""

    def decorate(method: Method) -> Method:
        wraps(describe)(method)
        described = signature(describe)
        own = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [own, *described.parameters.values()]
        bound = described.replace(parameters=parameters, return_annotation=returns)
        method.__signature__ = bound  # type: ignore[attr-defined]  # no type has it; `inspect` reads it
        return method

    return decorate


def _answer_of(describe: Callable[..., Call[T]]) -> Any:
    """Type of a call's answer."""
    (answer,) = get_args(get_type_hints(describe)["return"])
    return answer


def _awaited(describe: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncRolloutClient, P], Coroutine[Any, Any, T]]:
    """A method of the async client that sends the described call."""

    @_described_by(describe, _answer_of(describe))
    async def method(self: AsyncRolloutClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.send(describe(*args, **kwargs))

    return method


def _streamed(
    describe: Callable[P, EventsCall],
) -> Callable[Concatenate[AsyncRolloutClient, P], AsyncGenerator[Event, None]]:
    """A method of the async client that reads the described call's events."""

    @_described_by(describe, AsyncGenerator[Event, None])
    def method(self: AsyncRolloutClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[Event, None]:
        return self._events(describe(*args, **kwargs))

    return method


class AsyncRolloutClient(Sender):
    """Async client of a server, or of several. Use as an async context manager, or await `close`."""

    def __new__(cls, base_url: str | Sequence[str] = DEFAULT_URL, *args: Any, **settings: Any) -> Self:
        is_one = isinstance(base_url, str) or issubclass(cls, _FleetClient)
        return super().__new__(cls if is_one else _FleetClient)  # type: ignore[return-value]

    __new__.__signature__ = signature(Sender.__init__)  # type: ignore[attr-defined]  # as `help` is to show it

    rollout = _awaited(calls.rollout)
    stream = _streamed(calls.stream)
    models = _awaited(calls.models)
    post_rewards = _awaited(calls.post_rewards)
    post_named_rewards = _awaited(calls.post_named_rewards)
    quality_head = _awaited(calls.quality_head)
    set_quality_head = _awaited(calls.set_quality_head)
    report = _awaited(calls.report)
    detection_lengths = _awaited(calls.detection_lengths)
    prompts = _awaited(calls.prompts)
    state = _awaited(calls.state)
    set_state = _awaited(calls.set_state)
    vote = _awaited(calls.vote)
    runs = _awaited(run_calls.runs)
    engines = _awaited(calls.engines)
    engines_advice = _awaited(calls.engines_advice)
    drain = _awaited(calls.drain)
    restore = _awaited(calls.restore)
    give_weights = give_weights
    agents = agents

    async def run(
        self, group_size: int, prompts_per_round: int, id: str | None = None, **options: Unpack[RunOptions]
    ) -> AsyncRun:
        id = id or f"run-{uuid.uuid4().hex}"  # made here, so that a repeated request makes no second run
        return AsyncRun(self, await self.send(run_calls.create_run(group_size, prompts_per_round, id, **options)))

    run.__doc__ = run_calls.create_run.__doc__

    async def health(self) -> bool:
        """True if the server answers and its engine is alive. False without an answer or while the server starts."""
        try:
            response = await self._http.get("/health", timeout=HEALTH_TIMEOUT_S)
        except httpx.TransportError:
            return False
        return is_healthy(response)

    async def wait_until_ready(self, timeout_s: float = 600.0) -> None:
        """Wait until `health()` is True. Raises: TimeoutError after `timeout_s` seconds. RolloutError for other
        answers.
        """
        deadline = time.monotonic() + timeout_s
        while not await self.health():
            await self._sleep(poll_s(deadline, timeout_s, self.base_url))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class _FleetClient(Fleet, AsyncRolloutClient):
    """Async client of several servers. `Fleet` has the differences from a client of one server."""


class _BlockingClient(AsyncRolloutClient):
    """Client whose coroutines never wait, for one server. Overrides: __init__, _sleep, _aside."""

    def __init__(self, *args: Any, transport: Any = None, **settings: Any) -> None:
        http = httpx.Client(limits=LIMITS, transport=transport)
        super().__init__(*args, transport=BlockingTransport(http), **settings)

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def _aside(self, work: Callable[[], object]) -> None:
        if inspect.iscoroutine(returned := work()):
            returned.close()
            raise TypeError("an async function needs the client that is asynchronous, too: AsyncRolloutClient")


class RolloutClient:
    """Sync client. Use as a context manager, or call `close`. Safe to share between threads."""

    rollout = blocking(AsyncRolloutClient.rollout)
    stream = blocking_generator(AsyncRolloutClient.stream)
    models = blocking(AsyncRolloutClient.models)
    post_rewards = blocking(AsyncRolloutClient.post_rewards)
    post_named_rewards = blocking(AsyncRolloutClient.post_named_rewards)
    quality_head = blocking(AsyncRolloutClient.quality_head)
    set_quality_head = blocking(AsyncRolloutClient.set_quality_head)
    report = blocking(AsyncRolloutClient.report)
    detection_lengths = blocking(AsyncRolloutClient.detection_lengths)
    prompts = blocking(AsyncRolloutClient.prompts)
    state = blocking(AsyncRolloutClient.state)
    set_state = blocking(AsyncRolloutClient.set_state)
    vote = blocking(AsyncRolloutClient.vote)
    runs = blocking(AsyncRolloutClient.runs)
    engines = blocking(AsyncRolloutClient.engines)
    engines_advice = blocking(AsyncRolloutClient.engines_advice)
    drain = blocking(AsyncRolloutClient.drain)
    restore = blocking(AsyncRolloutClient.restore)
    give_weights = blocking(AsyncRolloutClient.give_weights)
    health = blocking(AsyncRolloutClient.health)
    wait_until_ready = blocking(AsyncRolloutClient.wait_until_ready)

    _finish: Callable[[Any], Any] = staticmethod(finished)

    def __init__(self, base_url: str | Sequence[str] = DEFAULT_URL, **settings: Any) -> None:
        self._loop: LoopThread | None = None
        if isinstance(base_url, str):
            self._awaited: AsyncRolloutClient = _BlockingClient(base_url, **settings)
        else:
            self._awaited, self._loop = _FleetClient(base_url, **settings), LoopThread()
            self._finish = self._loop.finished
        self.base_url, self.key_headers = self._awaited.base_url, self._awaited.key_headers

    update_wrapper(__init__, AsyncRolloutClient.__init__)

    def run(self, group_size: int, prompts_per_round: int, id: str | None = None, **options: Unpack[RunOptions]) -> Run:
        return Run(self._finish(self._awaited.run(group_size, prompts_per_round, id, **options)), self._finish)

    run.__doc__ = AsyncRolloutClient.run.__doc__

    def close(self) -> None:
        if self._loop is None:
            self._finish(self._awaited.close())
        elif self._finish is not finished:
            self._finish(self._awaited.close())
            self._loop.close()
            self._finish = finished

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

"""Clients of our endpoints, sync and async. Invariant: importing this needs neither vllm nor torch.

What can be asked, and how an answer is read, is said in `calls.py` for both; here is how each of them waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, get_args, get_type_hints

import httpx
from typing_extensions import Unpack

from vllm_rollout.client import calls, engine_calls, run_calls
from vllm_rollout.client.body import PromptLike, Redundancy, RolloutOptions, Selection, rollout_body
from vllm_rollout.client.calls import Call, EventsCall, QualityHead
from vllm_rollout.client.connection import (
    DEFAULT_URL,
    HEALTH_TIMEOUT_S,
    Connection,
    EventReader,
    RolloutError,
    is_healthy,
    poll_s,
    raise_for_error,
    transport_error,
)
from vllm_rollout.client.run import AsyncRun, Run
from vllm_rollout.client.run_calls import RunOptions
from vllm_rollout.server.answers import Event
from vllm_rollout.server.protocol import Pruning

__all__ = [
    "AsyncRolloutClient",
    "AsyncRun",
    "PromptLike",
    "Pruning",
    "QualityHead",
    "Redundancy",
    "RolloutClient",
    "RolloutError",
    "RolloutOptions",
    "Run",
    "Selection",
    "rollout_body",
]

T = TypeVar("T")
P = ParamSpec("P")
Method = TypeVar("Method", bound=Callable[..., Any])


def _described_by(describe: Callable[..., Any], returns: object) -> Callable[[Method], Method]:
    """Gives a method the name, words and signature of the description of its call."""

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
    """The type that a call is answered with."""
    (answer,) = get_args(get_type_hints(describe)["return"])
    return answer


def _sent(describe: Callable[P, Call[T]]) -> Callable[Concatenate[RolloutClient, P], T]:
    """A method of the sync client that sends the described call."""

    @_described_by(describe, _answer_of(describe))
    def method(self: RolloutClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.send(describe(*args, **kwargs))

    return method


def _awaited(describe: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncRolloutClient, P], Coroutine[Any, Any, T]]:
    """A method of the async client that sends the described call."""

    @_described_by(describe, _answer_of(describe))
    async def method(self: AsyncRolloutClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.send(describe(*args, **kwargs))

    return method


def _streamed(
    describe: Callable[P, EventsCall],
) -> Callable[Concatenate[RolloutClient, P], Generator[Event, None, None]]:
    """A method of the sync client that reads the described call's events."""

    @_described_by(describe, Generator[Event, None, None])
    def method(self: RolloutClient, /, *args: P.args, **kwargs: P.kwargs) -> Generator[Event, None, None]:
        return self._events(describe(*args, **kwargs))

    return method


def _async_streamed(
    describe: Callable[P, EventsCall],
) -> Callable[Concatenate[AsyncRolloutClient, P], AsyncGenerator[Event, None]]:
    """A method of the async client that reads the described call's events."""

    @_described_by(describe, AsyncGenerator[Event, None])
    def method(self: AsyncRolloutClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[Event, None]:
        return self._events(describe(*args, **kwargs))

    return method


class RolloutClient(Connection):
    """Sync client. Use as a context manager, or call `close`. Safe to share between threads."""

    rollout = _sent(calls.rollout)
    stream = _streamed(calls.stream)
    models = _sent(calls.models)
    post_rewards = _sent(calls.post_rewards)
    post_named_rewards = _sent(calls.post_named_rewards)
    quality_head = _sent(calls.quality_head)
    set_quality_head = _sent(calls.set_quality_head)
    report = _sent(calls.report)
    detection_lengths = _sent(calls.detection_lengths)
    prompts = _sent(calls.prompts)
    state = _sent(calls.state)
    set_state = _sent(calls.set_state)
    vote = _sent(calls.vote)
    runs = _sent(run_calls.runs)
    engines = _sent(engine_calls.engines)
    engines_advice = _sent(engine_calls.engines_advice)
    drain = _sent(engine_calls.drain)
    restore = _sent(engine_calls.restore)

    def run(self, group_size: int, prompts_per_round: int, id: str | None = None, **options: Unpack[RunOptions]) -> Run:
        return Run(self, self.send(run_calls.create_run(group_size, prompts_per_round, id, **options)))

    run.__doc__ = run_calls.create_run.__doc__

    def __init__(self, base_url: str = DEFAULT_URL, **settings: Any) -> None:
        super().__init__(base_url, **settings)
        self._http = httpx.Client(**self._settings)

    __init__.__doc__ = Connection.__init__.__doc__

    def health(self) -> bool:
        """Whether the server answers and its engine is alive."""
        try:
            response = self._http.get("/health", timeout=HEALTH_TIMEOUT_S)
        except httpx.TransportError:
            return False
        return is_healthy(response)

    def wait_until_ready(self, timeout_s: float = 600.0) -> None:
        """Wait until `health()`. Raises: TimeoutError after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while not self.health():
            time.sleep(poll_s(deadline, timeout_s, self.base_url))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self, method: str, path: str, body: object, timeout: float | None) -> httpx.Response:
        """The answer from its first byte on; what it says is still to be read."""
        attempt = 0
        while True:
            request = self._request(self._http, method, path, body, timeout)
            try:
                return self._http.send(request, stream=True)
            except httpx.TransportError as error:
                time.sleep(self._retries.delay_s(error, attempt, request.url))
                attempt += 1

    def send(self, call: Call[T]) -> T:
        response = self._open(call.method, call.path, call.body, call.timeout)
        try:
            response.read()
        except httpx.TransportError as error:
            raise transport_error(error, response.url) from error
        finally:
            response.close()
        raise_for_error(response)
        return call.read(response)

    def _events(self, call: EventsCall) -> Generator[Event, None, None]:
        response = self._open("POST", call.path, call.body, call.timeout)
        try:
            if response.is_error:
                response.read()
                raise_for_error(response)
            reader = EventReader(streams_tokens="stream_tokens" in call.body)
            for chunk in response.iter_bytes():
                yield from reader.feed(chunk)
            reader.close()
        except httpx.TransportError as error:
            raise transport_error(error, response.url) from error
        finally:
            response.close()


class AsyncRolloutClient(Connection):
    """Async client. Use as an async context manager, or await `close`."""

    rollout = _awaited(calls.rollout)
    stream = _async_streamed(calls.stream)
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
    engines = _awaited(engine_calls.engines)
    engines_advice = _awaited(engine_calls.engines_advice)
    drain = _awaited(engine_calls.drain)
    restore = _awaited(engine_calls.restore)

    async def run(
        self, group_size: int, prompts_per_round: int, id: str | None = None, **options: Unpack[RunOptions]
    ) -> AsyncRun:
        return AsyncRun(self, await self.send(run_calls.create_run(group_size, prompts_per_round, id, **options)))

    run.__doc__ = run_calls.create_run.__doc__

    def __init__(self, base_url: str = DEFAULT_URL, **settings: Any) -> None:
        super().__init__(base_url, **settings)
        self._http = httpx.AsyncClient(**self._settings)

    __init__.__doc__ = Connection.__init__.__doc__

    async def health(self) -> bool:
        """Whether the server answers and its engine is alive."""
        try:
            response = await self._http.get("/health", timeout=HEALTH_TIMEOUT_S)
        except httpx.TransportError:
            return False
        return is_healthy(response)

    async def wait_until_ready(self, timeout_s: float = 600.0) -> None:
        """Wait until `health()`. Raises: TimeoutError after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while not await self.health():
            await asyncio.sleep(poll_s(deadline, timeout_s, self.base_url))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _open(self, method: str, path: str, body: object, timeout: float | None) -> httpx.Response:
        """The answer from its first byte on; what it says is still to be read."""
        attempt = 0
        while True:
            request = self._request(self._http, method, path, body, timeout)
            try:
                return await self._http.send(request, stream=True)
            except httpx.TransportError as error:
                await asyncio.sleep(self._retries.delay_s(error, attempt, request.url))
                attempt += 1

    async def send(self, call: Call[T]) -> T:
        response = await self._open(call.method, call.path, call.body, call.timeout)
        try:
            await response.aread()
        except httpx.TransportError as error:
            raise transport_error(error, response.url) from error
        finally:
            await response.aclose()
        raise_for_error(response)
        return call.read(response)

    async def _events(self, call: EventsCall) -> AsyncGenerator[Event, None]:
        response = await self._open("POST", call.path, call.body, call.timeout)
        try:
            if response.is_error:
                await response.aread()
                raise_for_error(response)
            reader = EventReader(streams_tokens="stream_tokens" in call.body)
            async for chunk in response.aiter_bytes():
                for event in reader.feed(chunk):
                    yield event
            reader.close()
        except httpx.TransportError as error:
            raise transport_error(error, response.url) from error
        finally:
            await response.aclose()

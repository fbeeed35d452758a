"""Clients of our endpoints, sync and async. Invariant: importing this needs neither vllm nor torch.

Both clients build bodies, read answers and decide on retries with the same functions; they differ in how they wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping
from typing import Any, TypeVar

import httpx
from pydantic import TypeAdapter
from typing_extensions import Self, Unpack

from vllm_rollout.client.body import (
    PromptLike,
    Redundancy,
    RolloutOptions,
    Selection,
    rollout_body,
    takes_options,
)
from vllm_rollout.client.connection import (
    DEFAULT_URL,
    HEALTH_TIMEOUT_S,
    Connection,
    EventReader,
    RolloutError,
    is_healthy,
    model_names,
    parse,
    poll_s,
    raise_for_error,
    transport_error,
)
from vllm_rollout.client.learning import AsyncLearningMethods, Call, LearningMethods, QualityHead
from vllm_rollout.server.answers import Event, RolloutAnswer
from vllm_rollout.server.pruning_body import Pruning

__all__ = [
    "AsyncRolloutClient",
    "PromptLike",
    "Pruning",
    "QualityHead",
    "Redundancy",
    "RolloutClient",
    "RolloutError",
    "RolloutOptions",
    "Selection",
    "rollout_body",
]

T = TypeVar("T")
_ANSWER: TypeAdapter[RolloutAnswer] = TypeAdapter(RolloutAnswer)


class RolloutClient(Connection, LearningMethods):
    """Sync client. Use as a context manager, or call `close`. Safe to share between threads."""

    def __init__(self, base_url: str = DEFAULT_URL, **settings: Any) -> None:
        super().__init__(base_url, **settings)
        self._http = httpx.Client(**self._settings)

    __init__.__doc__ = Connection.__init__.__doc__

    @takes_options
    def rollout(
        self,
        prompts: Iterable[PromptLike],
        group_size: int,
        redundancy: Redundancy = 0,
        *,
        timeout: float | None = None,
        **options: Unpack[RolloutOptions],
    ) -> RolloutAnswer:
        """Run `group_size + redundancy` candidates per prompt; each complete group has `group_size` trajectories.

        With redundancy "auto" the server shares out up to `group_size` spare candidates per prompt, by what it has seen
        of lengths: give prompts ids that stay theirs.

        `timeout`: longest silence of the server in seconds, in place of the client's `read_timeout_s`.

        Raises: RolloutError with the server's words; TypeError for a prompt of no known form.
        """
        body = rollout_body(prompts, group_size, redundancy, stream=False, stream_tokens=None, **options)
        return parse(_ANSWER, self._read("POST", "/v1/rollouts", body, timeout))

    @takes_options
    def stream(
        self,
        prompts: Iterable[PromptLike],
        group_size: int,
        redundancy: Redundancy = 0,
        *,
        stream_tokens: int | None = None,
        timeout: float | None = None,
        **options: Unpack[RolloutOptions],
    ) -> Generator[Event, None, None]:
        """Like `rollout`, as events: trajectories and candidates, then their `group`, and `done` at the end.

        `stream_tokens`: also send `tokens` events, in chunks of at least that many tokens per candidate, the last one
        of a candidate excepted. Its chunks join without a gap (checked here) and make up its trajectory; a `candidate`
        event says that it is out and that no more of its tokens come. A reader may take its time: generation goes on,
        and later chunks are longer.

        The request is sent when the first event is asked for. Closing the generator (`contextlib.closing`, or dropping
        it) closes the connection, and the server aborts the candidates.

        Raises: RolloutError as `rollout`, at an `error` event, when the stream is cut and where tokens do not join.
        """
        body = rollout_body(prompts, group_size, redundancy, stream=True, stream_tokens=stream_tokens, **options)
        return self._events(body, timeout)

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

    def models(self) -> list[str]:
        """Names of the served models."""
        return model_names(self._read("GET", "/v1/models"))

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

    def _read(self, method: str, path: str, body: object = None, timeout: float | None = None) -> bytes:
        return self._answer(method, path, body, timeout).content

    def _call(self, call: Call[T]) -> T:
        return call.read(self._answer(call.method, call.path, call.body, None))

    def _answer(self, method: str, path: str, body: object, timeout: float | None) -> httpx.Response:
        response = self._open(method, path, body, timeout)
        try:
            response.read()
        except httpx.TransportError as error:
            raise transport_error(error, response.url) from error
        finally:
            response.close()
        raise_for_error(response)
        return response

    def _events(self, body: Mapping[str, Any], timeout: float | None) -> Generator[Event, None, None]:
        response = self._open("POST", "/v1/rollouts", body, timeout)
        try:
            if response.is_error:
                response.read()
                raise_for_error(response)
            reader = EventReader(streams_tokens="stream_tokens" in body)
            for chunk in response.iter_bytes():
                yield from reader.feed(chunk)
            reader.close()
        except httpx.TransportError as error:
            raise transport_error(error, response.url) from error
        finally:
            response.close()


class AsyncRolloutClient(Connection, AsyncLearningMethods):
    """Async client. Use as an async context manager, or await `close`."""

    def __init__(self, base_url: str = DEFAULT_URL, **settings: Any) -> None:
        super().__init__(base_url, **settings)
        self._http = httpx.AsyncClient(**self._settings)

    __init__.__doc__ = Connection.__init__.__doc__

    @takes_options
    async def rollout(
        self,
        prompts: Iterable[PromptLike],
        group_size: int,
        redundancy: Redundancy = 0,
        *,
        timeout: float | None = None,
        **options: Unpack[RolloutOptions],
    ) -> RolloutAnswer:
        """See `RolloutClient.rollout`. Cancelling it closes the connection, and the server aborts the candidates."""
        body = rollout_body(prompts, group_size, redundancy, stream=False, stream_tokens=None, **options)
        return parse(_ANSWER, await self._read("POST", "/v1/rollouts", body, timeout))

    @takes_options
    def stream(
        self,
        prompts: Iterable[PromptLike],
        group_size: int,
        redundancy: Redundancy = 0,
        *,
        stream_tokens: int | None = None,
        timeout: float | None = None,
        **options: Unpack[RolloutOptions],
    ) -> AsyncGenerator[Event, None]:
        """See `RolloutClient.stream`. Close it early with `contextlib.aclosing`."""
        body = rollout_body(prompts, group_size, redundancy, stream=True, stream_tokens=stream_tokens, **options)
        return self._events(body, timeout)

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

    async def models(self) -> list[str]:
        """Names of the served models."""
        return model_names(await self._read("GET", "/v1/models"))

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

    async def _read(self, method: str, path: str, body: object = None, timeout: float | None = None) -> bytes:
        return (await self._answer(method, path, body, timeout)).content

    async def _call(self, call: Call[T]) -> T:
        return call.read(await self._answer(call.method, call.path, call.body, None))

    async def _answer(self, method: str, path: str, body: object, timeout: float | None) -> httpx.Response:
        response = await self._open(method, path, body, timeout)
        try:
            await response.aread()
        except httpx.TransportError as error:
            raise transport_error(error, response.url) from error
        finally:
            await response.aclose()
        raise_for_error(response)
        return response

    async def _events(self, body: Mapping[str, Any], timeout: float | None) -> AsyncGenerator[Event, None]:
        response = await self._open("POST", "/v1/rollouts", body, timeout)
        try:
            if response.is_error:
                await response.aread()
                raise_for_error(response)
            reader = EventReader(streams_tokens="stream_tokens" in body)
            async for chunk in response.aiter_bytes():
                for event in reader.feed(chunk):
                    yield event
            reader.close()
        except httpx.TransportError as error:
            raise transport_error(error, response.url) from error
        finally:
            await response.aclose()

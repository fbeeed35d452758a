"""Sending of calls, shared by the parts of a client. Invariant: as in `connection.py`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from itertools import count
from typing import Any, TypeVar

import httpx

from vllm_rollout.kernel.client.calls import Call, EventsCall
from vllm_rollout.kernel.client.connection import Connection, EventReader, event_data, raise_for_error, transport_error
from vllm_rollout.kernel.http.answers import Event

T = TypeVar("T")


class Sender(Connection):
    """Sends the calls of `calls.py` to one server."""

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _aside(self, work: Callable[[], object]) -> None:
        """Run long work, sync or async, while the loop goes on. Returns once the work has ended, also if cancelled."""
        thread = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            returned = await asyncio.shield(thread)
        except asyncio.CancelledError:
            await asyncio.wait([thread])
            raise
        if inspect.isawaitable(returned):
            await returned

    @asynccontextmanager
    async def _placed(self, num_candidates: int) -> AsyncIterator[Sender]:
        """The server for a new group of sessions. The group stays at this server."""
        yield self

    async def _attempt(self, request: httpx.Request) -> httpx.Response:
        return await self._http.send(request, stream=True)

    async def _open(
        self,
        method: str,
        path: str,
        body: object = None,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Send a request, with retries. Returns the answer with its body still unread."""
        settings: dict[str, Any] = {"headers": headers, "content" if isinstance(body, bytes) else "json": body}
        if timeout is not None:
            settings["timeout"] = self._timeout(timeout)
        for attempt in count():
            request = self._http.build_request(method, path, **settings)
            try:
                return await self._attempt(request)
            except httpx.TransportError as error:
                await self._sleep(self._delay_s(error, attempt, request.url))
        raise AssertionError("attempts end by an answer or an error")

    async def send(self, call: Call[T]) -> T:
        response = await self._open(call.method, call.path, call.body, call.timeout, call.headers)
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
        reader = EventReader(call.events, streams_tokens="stream_tokens" in call.body)
        try:
            async with aclosing(event_data(response)) as each:
                async for data in each:
                    yield reader.read(data)
            reader.close()
        except httpx.TransportError as error:
            raise transport_error(error, response.url) from error

"""Sync versions of async code. Invariant: a coroutine that `finished` runs never waits.

The sync client sends over `BlockingTransport` and sleeps by blocking, so that each coroutine runs to its end at once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx

T = TypeVar("T")
P = ParamSpec("P")


class BlockingTransport(httpx.AsyncBaseTransport):
    """Sends requests by a blocking httpx client. Overrides: handle_async_request, aclose."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = self._http.send(request, stream=True)
        return httpx.Response(
            response.status_code, headers=response.headers, stream=_Blocking(response), extensions=response.extensions
        )

    async def aclose(self) -> None:
        self._http.close()


class _Blocking(httpx.AsyncByteStream):
    """Undecoded bytes of an answer as they arrive. Overrides: __aiter__, aclose."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert isinstance(self._response.stream, httpx.SyncByteStream)  # the client blocks
        for chunk in self._response.stream:
            yield chunk

    async def aclose(self) -> None:
        self._response.close()


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        returned: T = end.value
        return returned
    raise AssertionError(f"{coroutine!r} waits for something")


class Blocked:
    """Base of classes with sync versions of async methods."""

    _awaited: Any
    """The object with the async methods."""
    _finish: Callable[[Any], Any]
    """Runs a coroutine, and returns its result."""


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Sync version of an async method, for a class that is `Blocked`."""

    @wraps(method)
    def done(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        returned: T = self._finish(getattr(self._awaited, method.__name__)(*args, **kwargs))
        return returned

    return done


def blocking_generator(
    method: Callable[Concatenate[Any, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Any, P], Generator[T, None, None]]:
    """Sync version of an async generator method, like `blocking`."""

    @wraps(method)
    def done(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        return _items(getattr(self._awaited, method.__name__)(*args, **kwargs), self._finish)

    return done


def _items(source: AsyncGenerator[T, None], finish: Callable[[Any], Any]) -> Generator[T, None, None]:
    try:
        while True:
            try:
                item = finish(anext(source))
            except StopAsyncIteration:
                return
            yield item
    finally:
        finish(source.aclose())

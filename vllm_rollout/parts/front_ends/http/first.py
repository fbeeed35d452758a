"""Requests for the first of several API processes. It serves all state that one process must know as a whole:
groups without a name, and what parts have below the paths of their face `first`. The other processes forward such
requests to it.

Invariant: a client cannot tell which process has read its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from http import HTTPStatus
from itertools import chain
from pathlib import Path
from typing import Final

import httpx
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_rollout.kernel.http.boundary import answer_by_body
from vllm_rollout.kernel.http.clients import path_of
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.errors import error_response
from vllm_rollout.kernel.http.slices import unless
from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.xargs import CLAIMED_ROWS, MARK, NAMES

ROOTS: Final = ("/v1/rewards",)
BELOW: Final = "/v1/rollouts/"
"""Paths below it are for rewards, the state (with its runs) and the page's feed. A rollout itself is served by any
process."""
JOINING: Final = {"/v1/chat/completions", "/v1/completions", "/inference/v1/generate"}
"""Endpoints whose requests a part may claim, or which may be members of a group."""
GROUP, SIZE = (f'"{NAMES[field]}"'.encode() for field in ("group_id", "group_size"))
CLAIMED: Final = [f'"{NAMES[field]}"'.encode() for field in CLAIMED_ROWS]
STATES_A_BODY: Final = {b"content-length", b"transfer-encoding"}
OF_ONE_HOP: Final = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"date", b"server"}
"""Headers of one connection, which are not forwarded."""
IDLE_S: Final = 60.0
"""Seconds that an idle connection to the first process is kept."""
NUM_TRIES: Final = 5
"""Attempts to connect to the first process while it starts, within some seconds."""


class FirstProcess:
    """The connection to the first process, in each of the others."""

    def __init__(self, socket: Path, in_use: Path) -> None:
        """`socket`: the first process's socket. `in_use`: a file that exists as soon as that process has had a
        session."""
        self._in_use = in_use
        self._roots = (*ROOTS, *chain.from_iterable(paths for _, paths in faces("first")))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE_S)
        self._transport = httpx.AsyncHTTPTransport(uds=str(socket), limits=limits, retries=NUM_TRIES)

    def has(self, path: str) -> bool:
        """True if the first process serves this path, whichever process is asked."""
        return path.startswith(BELOW) or any(path == root or path.startswith(f"{root}/") for root in self._roots)

    def joins(self, body: bytes, *, in_session: bool) -> bool:
        """True if a part may claim the request, or the request joins a group without a name, whose members must
        meet in one process.

        `in_session`: the request has the header X-Session-ID. Many harnesses send it without any group. So it only
        counts with a group id, or if there were sessions.
        """
        if MARK in body and (any(name in body for name in CLAIMED) or (SIZE in body and GROUP not in body)):
            return True
        return in_session and (GROUP in body or self._in_use.exists())

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request and its answer. The first process notices if the client leaves."""
        is_sent = asyncio.Event()
        body: AsyncIterator[bytes] | None = None
        if any(name in STATES_A_BODY for name, _ in scope["headers"]):
            body = _body(receive, is_sent)
        else:
            is_sent.set()

        async def left() -> None:
            await is_sent.wait()
            while (await receive())["type"] != "http.disconnect":
                pass

        await unless(self._pass(scope, body, send), left())

    async def _pass(self, scope: Scope, body: AsyncIterator[bytes] | None, send: Send) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name not in OF_ONE_HOP]
        target = scope.get("raw_path") or scope["path"].encode()
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        request = httpx.Request(
            scope["method"], "http://first", headers=headers, content=body, extensions={"target": target}
        )
        try:
            response = await self._transport.handle_async_request(request)
        except httpx.TransportError as error:
            await error_response(_unanswered(error))(scope, _nothing, send)
            return
        except ClientDisconnect:
            return
        try:
            kept = [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in OF_ONE_HOP]
            await send({"type": "http.response.start", "status": response.status_code, "headers": kept})
            async for chunk in response.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()


def _unanswered(error: httpx.TransportError) -> RequestError:
    """The reason why the first process has not answered, for the client."""
    if isinstance(error, httpx.ConnectError):
        return RequestError(
            "the first process of this server does not answer yet. Try again.",
            status=HTTPStatus.SERVICE_UNAVAILABLE,
            retry_after_s=1,
        )
    return RequestError(
        "the first process of this server ended amid the request. Look at what the request has done, or repeat it with "
        "its idempotency_key, if it has one.",
        status=HTTPStatus.BAD_GATEWAY,
    )


class HandOn:
    """ASGI middleware of the other processes: forwards requests that the first process serves."""

    def __init__(self, app: ASGIApp, first: FirstProcess, lacks_key: Callable[[Scope], bool]) -> None:
        """`lacks_key`: returns True if the app refuses the request for want of a key. Then its body is not read."""
        self._app, self._first, self._lacks_key = app, first, lacks_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and not self._lacks_key(scope):
            path = path_of(scope)
            if self._first.has(path):
                answer = self._first.answer
            elif path in JOINING and scope["method"] == "POST":
                # The first process answers whatever it is: a large body may have the fields of a group at its end.
                await answer_by_body(partial(self._choose, scope), self._first.answer, scope, receive, send)
                return
        await answer(scope, receive, send)

    def _choose(self, scope: Scope, body: bytes) -> tuple[ASGIApp, Scope]:
        joins = self._first.joins(body, in_session="x-session-id" in Headers(scope=scope))
        return self._first.answer if joins else self._app, scope


async def _body(receive: Receive, is_sent: asyncio.Event) -> AsyncIterator[bytes]:
    """The chunks of a request's body. Raises: ClientDisconnect."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        if chunk := message.get("body", b""):
            yield chunk
        more = message.get("more_body", False)
    is_sent.set()


async def _nothing() -> Message:
    return {"type": "http.disconnect"}

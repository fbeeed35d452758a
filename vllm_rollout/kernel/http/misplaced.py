"""Refuses our fields where vLLM's endpoints would ignore them. vLLM ignores unknown fields, and would answer without
a group.

Invariant: a body without one of our names is passed on unchanged, and is not decoded here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_rollout.kernel.http.clients import path_of
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.errors import error_response
from vllm_rollout.kernel.xargs import GRADING, MARK, NAMES

XARGS, EXTRA_ARGS = "vllm_xargs", "sampling_params.extra_args"
PLACES: Final[Mapping[str, str | None]] = {
    "/v1/completions": XARGS,
    "/v1/chat/completions": XARGS,
    "/v1/responses": XARGS,
    "/v1/messages": XARGS,
    "/invocations": XARGS,
    "/inference/v1/generate": EXTRA_ARGS,
    "/v1/chat/completions/batch": None,
    "/cohere/v2/chat": None,
    "/v1/systemone": None,
}
"""Endpoints that generate -> the object in which they read our fields. None: they do not read them."""
OBJECTS: Final = ("vllm_xargs", "extra_args", "extra_body", "sampling_params")
"""Objects of a body in which somebody may write them, with those inside of these."""
FIELDS: Final = frozenset({*NAMES.values(), *GRADING})


class MisplacedFields:
    """ASGI middleware before vLLM's endpoints: 400 for a field that would be ignored."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (path := path_of(scope)) not in PLACES:
            await self._app(scope, receive, send)
            return
        chunks: list[bytes] = []
        is_marked, tail, refusal = False, b"", None

        async def receive_checked() -> Message:
            nonlocal is_marked, tail, refusal
            message = await receive()
            if message["type"] != "http.request":
                return message
            chunk = message.get("body", b"")
            chunks.append(chunk)
            is_marked, tail = is_marked or MARK in tail + chunk, (tail + chunk)[1 - len(MARK) :]
            if is_marked and not message.get("more_body", False):
                refusal = refusal_of(b"".join(chunks), PLACES[path])
            return {"type": "http.disconnect"} if refusal is not None else message

        async def send_unless_refused(message: Message) -> None:
            if refusal is None:
                await send(message)

        try:
            await self._app(scope, receive_checked, send_unless_refused)
        except ClientDisconnect:
            if refusal is None:
                raise
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)


def refusal_of(body: bytes, place: str | None) -> RequestError | None:
    """The error for a body that has one of our fields outside of `place`. None if there is none."""
    for found, names in _objects(body):
        if found == place:
            continue
        for name in names:
            if name in FIELDS:
                return _refusal(name, found, place)
    return None


def _refusal(name: str, found: str, place: str | None) -> RequestError:
    field = f"{found}.{name}" if found else name
    if place is None:
        problem = "is not read at this endpoint, which has no groups"
        remedy = "Send the request to /v1/rollouts, /v1/chat/completions, /v1/completions or /inference/v1/generate."
    else:
        problem = f"is read in {place} only, found {f'in {found}' if found else 'at the top level'}"
        opening = "".join(f'{{"{part}": ' for part in place.split("."))
        remedy = f'Write {opening}{{"{name}": …}}{"}" * len(place.split("."))}.'
    return RequestError(f"{field}: {problem}. {remedy}", param=field)


def _objects(body: bytes | msgspec.Raw, place: str = "") -> Iterator[tuple[str, Mapping[str, msgspec.Raw]]]:
    """The body and the objects in it that may have our fields, each with its place. Parts that are not JSON objects
    are left out."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return
    yield place, fields
    for name in OBJECTS:
        if name in fields and place.count(".") < 1:
            yield from _objects(fields[name], f"{place}.{name}" if place else name)

"""A rollout as server-sent events.

Invariant: the source ends when the client goes away, and what fails says so in the last event.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar, get_args

from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter
from starlette.types import Message, Receive, Scope, Send

from vllm_rollout.server.answers import ErrorEvent, Event
from vllm_rollout.server.engine import RequestError
from vllm_rollout.server.errors import error_body, explain_internal
from vllm_rollout.server.serialised import encode, num_tokens_in

logger = logging.getLogger(__name__)
T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""Status of an answer that nobody waits for any more."""

STALLED_S = 3600.0
"""A trainer may read nothing during a step of training, in seconds. After that its stream is taken for abandoned."""


def event_stream_schema(events: Any) -> dict[str, Any]:
    """OpenAPI's media type object of a stream of these events, in FastAPI's form."""
    schema = TypeAdapter(events).json_schema(mode="serialization")
    definitions = schema.pop("$defs")

    def inlined(value: Any) -> Any:
        if isinstance(value, list):
            return [inlined(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return inlined(definitions[value["$ref"].removeprefix("#/$defs/")])
        return {key: inlined(item) for key, item in value.items()}

    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": inlined(schema)}
    names = [model.model_fields["type"].default for model in get_args(events)]
    item = {"type": "object", "required": ["event", "data"], "properties": {"event": {"enum": names}, "data": data}}
    return {"itemSchema": item, "example": EVENT_STREAM_EXAMPLE}


EVENT_STREAM_EXAMPLE = "".join(
    f"event: {json.loads(data)['type']}\ndata: {data}\n\n"
    for data in (
        '{"type": "tokens", "prompt_id": "q1", "index": 0, "offset": 0, "token_ids": [9, 4], "logprobs": [-0.5, -1.2]}',
        '{"type": "done", "id": "rollout-1", "created": 0, "model": "m", "usage": {"num_finished": 1}, "timing": {}}',
    )
)


class EventStream(StreamingResponse):
    """An event stream that ends its source at once when the client goes away, whether or not it is being read.

    One that nobody reads for `STALLED_S` ends too: its server closes the connection. Overrides: __call__,
    stream_response.
    """

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = PatientSend(send)
        await unless_disconnected(receive, self.stream_response(reader), reader.stalled())

    async def stream_response(self, send: Send) -> None:
        assert isinstance(self.body_iterator, AsyncGenerator)  # as `server_sent_events` makes it
        async with aclosing(self.body_iterator):
            await super().stream_response(send)


class PatientSend:
    """Sends, and knows for how long the client has not taken what is sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._since_s: float | None = None
        """When the message began that is being sent."""

    async def __call__(self, message: Message) -> None:
        self._since_s = time.monotonic()
        await self._send(message)
        self._since_s = None

    async def stalled(self) -> None:
        """Returns when one message has not been taken for `STALLED_S`."""
        while True:
            waited_s = 0.0 if self._since_s is None else time.monotonic() - self._since_s
            if waited_s >= STALLED_S:
                logger.warning("nobody read a rollout's stream for %.0f s: it ends", waited_s)
                return
            await asyncio.sleep(STALLED_S - waited_s)


async def server_sent_events(name: str, source: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    """The events of `source`; `name` is for the log."""
    try:
        async with aclosing(source) as events:
            async for event in events:
                yield await _sse(event)
    except RequestError as error:
        yield await _sse(ErrorEvent(error=error_body(error)))
    except Exception as error:  # the HTTP boundary: the status line is gone, so the stream must say it
        logger.exception("%s failed", name)
        yield await _sse(ErrorEvent(error=error_body(explain_internal(error))))


async def _sse(event: Event) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event.type.encode(), await encode(event, num_tokens_in(event)))


async def unless_disconnected(receive: Receive, work: Awaitable[T], *ends: Awaitable[None]) -> T | None:
    """Await `work`; when the client goes away or one of `ends` comes first, cancel it and return None."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    watching = [asyncio.ensure_future(end) for end in (disconnected(), *ends)]
    try:
        await asyncio.wait([working, *watching], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, *watching):
            task.cancel()
        await asyncio.gather(working, *watching, return_exceptions=True)

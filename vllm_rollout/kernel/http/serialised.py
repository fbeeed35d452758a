"""Answers and events as JSON, and ways to send them. Large ones are encoded beside the event loop.

A trajectory is encoded when it ends and is then held as bytes, which take a third of the memory of its numbers as
objects.

Invariants: the bytes are those of pydantic's `model_dump_json`. No encoding holds the interpreter for longer than one
trajectory takes. A stream's source ends when the client goes away. A failure is reported in the stream's last event.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, TypeVar, get_args

import msgspec
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, TypeAdapter
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from vllm_rollout.kernel.http.answers import (
    CandidateEvent,
    ErrorEvent,
    GroupEvent,
    GroupSummary,
    RewardEvent,
    RewardFields,
    RolloutAnswer,
    StoppedCandidate,
    TokensEvent,
    TrajectoryEvent,
    VoidsGroup,
)
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.errors import error_body, explain_internal
from vllm_rollout.kernel.http.slices import unless

logger = logging.getLogger(__name__)
T = TypeVar("T")

LARGE_TOKENS = 2048
"""Values with at least this many tokens are encoded in the thread: 0.1 ms of encoding pays for the switch."""
PART_BYTES = 256 * 1024
"""Size in bytes up to which parts of a body are joined. Each part is one message to the HTTP server."""

_ENCODER = msgspec.json.Encoder(enc_hook=vars)
"""Encodes a pydantic model by its attributes, which are its fields in order."""
_THREADS = ThreadPoolExecutor(1, thread_name_prefix="vllm_rollout-json")
"""A single thread, since the interpreter encodes one value at a time anyway."""


def to_json(value: BaseModel) -> bytes:
    return _ENCODER.encode(value)


async def encode(value: BaseModel, num_tokens: int) -> bytes:
    """JSON of a value with `num_tokens` tokens in it."""
    if num_tokens < LARGE_TOKENS:
        return to_json(value)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, to_json, value)


def num_tokens_in(event: BaseModel) -> int:
    """Number of tokens that an event lists."""
    match event:
        case TokensEvent():
            return len(event.token_ids)
        case TrajectoryEvent():
            return len(event.trajectory.token_ids)
        case CandidateEvent(candidate=StoppedCandidate() as candidate):
            return len(candidate.token_ids)
        case GroupEvent():
            return len(event.prompt_token_ids)
    return getattr(event, "generated_tokens", 0)


_NO_REWARD = to_json(RewardFields())[:-1]
"""The beginning of the JSON of a trajectory without a reward."""


class GroupsInJson:
    """The groups of an answer, put together from events as they come."""

    def __init__(self) -> None:
        self._trajectories: dict[str, dict[int, bytes]] = defaultdict(dict)
        """Trajectories as JSON, by prompt id and index."""
        self._candidates: dict[str, dict[int, bytes]] = defaultdict(dict)
        self._groups: dict[str, bytes] = {}

    async def add(self, event: BaseModel) -> None:
        num_tokens = num_tokens_in(event)
        match event:
            case TrajectoryEvent(trajectory=ended):
                json = await encode(ended, num_tokens)
                self._trajectories[event.prompt_id][ended.index] = json
            case CandidateEvent(candidate=ended):
                json = await encode(ended, num_tokens)
                self._candidates[event.prompt_id][ended.index] = json
            case RewardEvent(reward_status="void"):  # it comes again, among the candidates
                del self._trajectories[event.prompt_id][event.index]
            case RewardEvent():
                self._reward(event)
            case GroupEvent():
                self._groups[event.prompt_id] = self._group(event)
            case VoidsGroup():
                self._trajectories.pop(event.prompt_id, None)
                self._candidates.pop(event.prompt_id, None)

    def of(self, prompt_id: str) -> bytes:
        """A finished group: a GroupAnswer as JSON."""
        return self._groups[prompt_id]

    def answer(self, envelope: RolloutAnswer, prompt_ids: Iterable[str]) -> list[bytes]:
        """The body of an answer, in parts. `envelope`: the answer without its groups."""
        return filled(envelope, "groups", [self._groups.pop(prompt_id) for prompt_id in prompt_ids])

    def _reward(self, event: RewardEvent) -> None:
        """Put the reward into the JSON of a trajectory that was encoded before. Reward fields stand first in it."""
        told = self._trajectories[event.prompt_id]
        json = told[event.index]
        assert json.startswith(_NO_REWARD)
        fields = _ENCODER.encode({name: getattr(event, name) for name in RewardFields.model_fields})
        told[event.index] = fields[:-1] + json[len(_NO_REWARD) :]

    def _group(self, event: GroupEvent) -> bytes:
        fields = vars(event)
        return _ENCODER.encode(
            {
                **{name: fields[name] for name in GroupSummary.model_fields},
                "trajectories": _in_order(self._trajectories.pop(event.prompt_id, {})),
                "candidates": _in_order(self._candidates.pop(event.prompt_id, {})),
            }
        )


def _in_order(parts: dict[int, bytes]) -> list[msgspec.Raw]:
    return [msgspec.Raw(parts[index]) for index in sorted(parts)]


def filled(envelope: BaseModel, field: str, items: Iterable[bytes]) -> list[bytes]:
    """The body of `envelope` in parts, with these items in its empty list `field`."""
    name = field.encode()
    before, after = to_json(envelope).split(b'"%s":[]' % name)  # within a string its quotes would be escaped
    listed = [part for item in items for part in (b",", item)][1:]
    return merged([before, b'"%s":[' % name, *listed, b"]", after])


def merged(parts: Iterable[bytes]) -> list[bytes]:
    """Join small parts of a body. Large parts are not copied."""
    large: list[bytes] = []
    small: list[bytes] = []
    num_bytes = 0
    for part in parts:
        if num_bytes and num_bytes + len(part) > PART_BYTES:
            large.append(b"".join(small))
            small, num_bytes = [], 0
        small.append(part)
        num_bytes += len(part)
    return [*large, b"".join(small)]


class PartsResponse(Response):
    """A JSON body that is sent in parts. Overrides: __call__."""

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes]) -> None:
        super().__init__(headers={"content-length": str(sum(map(len, parts)))})
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def json_response(answer: BaseModel, status: int = HTTPStatus.OK) -> Response:
    """A response with a small body, which pydantic encodes at once."""
    return Response(answer.model_dump_json(), status_code=status, media_type="application/json")


CLIENT_CLOSED_REQUEST = 499
"""Status of an answer to a client that has gone away."""

STALLED_S = 3600.0
"""Seconds without any reading after which a stream is taken for abandoned. A trainer may read nothing during a step
of training."""


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
    names = list(dict.fromkeys(model.model_fields["type"].default for model in get_args(events)))
    item = {"type": "object", "required": ["event", "data"], "properties": {"event": {"enum": names}, "data": data}}
    return {"itemSchema": item, "example": EVENT_STREAM_EXAMPLE}


EVENT_STREAM_EXAMPLE = "".join(
    f"event: {json.loads(data)['type']}\ndata: {data}\n\n"
    for data in (
        '{"type": "tokens", "prompt_id": "q1", "index": 0, "offset": 0, "token_ids": [9, 4], "logprobs": [-0.5, -1.2]}',
        '{"type": "done", "id": "rollout-1", "created": 0, "model": "m", "usage": {"num_finished": 1}, "timing": {}}',
    )
)


LIVE_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
"""Headers of an event stream that is read by GET: caches keep nothing of it, and proxies hold nothing back."""


class EventStream(StreamingResponse):
    """An event stream that ends its source at once when the client goes away, even while no event is sent.

    A stream that is not read for `STALLED_S` seconds ends too, and its server closes the connection. Overrides:
    __call__, stream_response.
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
    """Sends messages, and measures how long the client has not taken the current one."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._since_s: float | None = None
        """Start of the message that is being sent, in monotonic seconds. None between messages."""

    async def __call__(self, message: Message) -> None:
        self._since_s = time.monotonic()
        await self._send(message)
        self._since_s = None

    async def stalled(self) -> None:
        """Return once a message has not been taken for `STALLED_S` seconds."""
        while True:
            waited_s = 0.0 if self._since_s is None else time.monotonic() - self._since_s
            if waited_s >= STALLED_S:
                logger.warning("nobody read a rollout's stream for %.0f s: it ends", waited_s)
                return
            await asyncio.sleep(STALLED_S - waited_s)


async def server_sent_events(name: str, source: AsyncGenerator[Any, None]) -> AsyncGenerator[bytes, None]:
    """The events of `source` as server-sent events. `name` is for the log."""
    try:
        async with aclosing(source) as events:
            async for event in events:
                yield await _sse(event)
    except RequestError as error:
        yield await _sse(ErrorEvent(error=error_body(error)))
    except Exception as error:  # the HTTP boundary: the status line is gone, so the stream must say it
        logger.exception("%s failed", name)
        yield await _sse(ErrorEvent(error=error_body(explain_internal(error))))


async def _sse(event: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event.type.encode(), await encode(event, num_tokens_in(event)))


async def unless_disconnected(receive: Receive, work: Awaitable[T], *ends: Awaitable[None]) -> T | None:
    """Await `work`. If the client goes away or one of `ends` is done first, cancel it and return None."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    return await unless(work, disconnected(), *ends)

"""Answers and events as JSON, made beside the event loop when they are large.

A trajectory is encoded when it ends and is held as bytes from then on, a third of what its numbers take as objects.
Invariant: the bytes are those of pydantic's `model_dump_json`, and nobody holds the interpreter for longer than one
trajectory takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm_rollout.server.answers import (
    CandidateEvent,
    DeferredEvent,
    GroupEvent,
    GroupSummary,
    RestartedEvent,
    RolloutAnswer,
    TokensEvent,
    TrajectoryEvent,
    UnselectedCandidate,
)

LARGE_TOKENS = 2048
"""Tokens from which on a thread is worth its switch: 0.1 ms of encoding."""
PART_BYTES = 256 * 1024
"""Parts of a body are put together up to this size: a part is one message to the HTTP server."""

_ENCODER = msgspec.json.Encoder(enc_hook=vars)
"""A pydantic model has its fields, in order, as its attributes."""
_THREADS = ThreadPoolExecutor(1, thread_name_prefix="vllm_rollout-json")
"""One: the interpreter encodes one at a time anyway."""


def to_json(value: BaseModel) -> bytes:
    return _ENCODER.encode(value)


async def encode(value: BaseModel, num_tokens: int) -> bytes:
    """JSON of something with so many tokens in it."""
    if num_tokens < LARGE_TOKENS:
        return to_json(value)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, to_json, value)


def num_tokens_in(event: BaseModel) -> int:
    """Tokens that an event lists."""
    match event:
        case TokensEvent():
            return len(event.token_ids)
        case TrajectoryEvent():
            return len(event.trajectory.token_ids)
        case CandidateEvent(candidate=UnselectedCandidate() as candidate):
            return len(candidate.token_ids)
        case GroupEvent():
            return len(event.prompt_token_ids)
    return 0


class GroupsInJson:
    """The groups of an answer, put together from events as they come."""

    def __init__(self) -> None:
        self._trajectories: dict[str, list[tuple[int, bytes]]] = {}
        """By prompt id: index and JSON."""
        self._candidates: dict[str, list[tuple[int, bytes]]] = {}
        self._groups: dict[str, bytes] = {}

    async def add(self, event: BaseModel) -> None:
        num_tokens = num_tokens_in(event)
        match event:
            case TrajectoryEvent(trajectory=ended):
                part = ended.index, await encode(ended, num_tokens)
                self._trajectories.setdefault(event.prompt_id, []).append(part)
            case CandidateEvent(candidate=ended):
                part = ended.index, await encode(ended, num_tokens)
                self._candidates.setdefault(event.prompt_id, []).append(part)
            case GroupEvent():
                self._groups[event.prompt_id] = self._group(event)
            case DeferredEvent() | RestartedEvent():
                self._trajectories.pop(event.prompt_id, None)
                self._candidates.pop(event.prompt_id, None)

    def answer(self, envelope: RolloutAnswer, prompt_ids: Iterable[str]) -> list[bytes]:
        """The body, in parts; `envelope` is the answer without its groups."""
        return filled(envelope, "groups", [self._groups.pop(prompt_id) for prompt_id in prompt_ids])

    def _group(self, event: GroupEvent) -> bytes:
        fields = vars(event)
        return _ENCODER.encode(
            {
                **{name: fields[name] for name in GroupSummary.model_fields},
                "trajectories": _in_order(self._trajectories.pop(event.prompt_id, [])),
                "candidates": _in_order(self._candidates.pop(event.prompt_id, [])),
            }
        )


def _in_order(parts: list[tuple[int, bytes]]) -> list[msgspec.Raw]:
    return [msgspec.Raw(json) for _, json in sorted(parts)]


def filled(envelope: BaseModel, field: str, items: Iterable[bytes]) -> list[bytes]:
    """The body of `envelope`, whose list `field` is empty, with these items in it; in parts."""
    name = field.encode()
    before, after = to_json(envelope).split(b'"%s":[]' % name)  # within a string its quotes would be escaped
    listed = [part for item in items for part in (b",", item)][1:]
    return merged([before, b'"%s":[' % name, *listed, b"]", after])


def merged(parts: Iterable[bytes]) -> list[bytes]:
    """The same bytes in fewer parts; a large one is not copied."""
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
    """A JSON body that is never in one piece. Overrides: __call__."""

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes]) -> None:
        super().__init__(headers={"content-length": str(sum(map(len, parts)))})
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

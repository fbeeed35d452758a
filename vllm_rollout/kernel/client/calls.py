"""The calls of a race, one description per call. Parts describe theirs in the same form.

Invariant: a call is described once, for both clients. Arguments, defaults and docstring of a call are those of the
clients' method of the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx
from pydantic import BaseModel
from typing_extensions import Unpack

from vllm_rollout.kernel.client.body import PromptLike, Redundancy, RolloutOptions, rollout_body, said, takes_options
from vllm_rollout.kernel.client.connection import adapter, parse
from vllm_rollout.kernel.http.answers import RolloutAnswer, RolloutEvent
from vllm_rollout.kernel.http.protocol import RolloutRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and the function that reads its answer."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    body: object = None
    """Body of the request. Bytes are sent unchanged, other values as JSON."""
    timeout: float | None = None
    """Longest silence of the server in seconds. None: the client's `read_timeout_s`."""
    headers: Mapping[str, str] | None = None
    """Headers added to the client's own."""


@dataclass(frozen=True, slots=True)
class EventsCall:
    """A rollout whose answer is read as events."""

    body: Mapping[str, Any]
    timeout: float | None
    path: str = "/v1/rollouts"
    events: Any = RolloutEvent
    """Union of the classes of events."""


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


def typed(form: type[T]) -> Callable[[httpx.Response], T]:
    """A function that parses an answer as `form`."""

    def read(response: httpx.Response) -> T:
        answer: T = parse(adapter(form), response.content)
        return answer

    return read


@takes_options(RolloutOptions, RolloutRequest)
def rollout(
    prompts: Iterable[PromptLike],
    group_size: int,
    redundancy: Redundancy = 0,
    *,
    timeout: float | None = None,
    **options: Unpack[RolloutOptions],
) -> Call[RolloutAnswer]:
    """Run `group_size + redundancy` candidates per prompt. Each complete group has `group_size` trajectories.

    With redundancy "auto" the server distributes up to `group_size` spare candidates per prompt, by the lengths that it
    has observed. For this, give each prompt an id that stays the same.

    `timeout`: longest silence of the server in seconds, in place of the client's `read_timeout_s`. Cancelling the async
    client's call closes the connection, and the server aborts the candidates.

    Raises: RolloutError with the server's words. TypeError for a prompt of unknown form, and for an unknown option.
    """
    body = rollout_body(prompts, group_size, redundancy, stream=False, stream_tokens=None, **options)
    return Call("POST", "/v1/rollouts", typed(RolloutAnswer), body, timeout)


@takes_options(RolloutOptions, RolloutRequest)
def stream(
    prompts: Iterable[PromptLike],
    group_size: int,
    redundancy: Redundancy = 0,
    *,
    stream_tokens: int | None = None,
    timeout: float | None = None,
    **options: Unpack[RolloutOptions],
) -> EventsCall:
    """Like `rollout`, as events: trajectories and candidates, then their `group`, and `done` at the end.

    `stream_tokens`: also send `tokens` events, in chunks of at least this many tokens per candidate. The last chunk of
    a candidate may be shorter. The chunks of a candidate join without a gap (checked here) and make up its trajectory.
    After a `candidate` event no more tokens of that candidate come. A slow reader does not stop generation: later
    chunks are longer.

    The request is sent when the first event is asked for. Closing the generator (`contextlib.closing` or `aclosing`, or
    dropping it) closes the connection, and the server aborts the candidates.

    Raises: RolloutError as `rollout`, at an `error` event, if the stream is cut, and if tokens do not join.
    """
    body = rollout_body(prompts, group_size, redundancy, stream=True, stream_tokens=stream_tokens, **options)
    return EventsCall(body, timeout)


def models() -> Call[list[str]]:
    """Names of the served models."""
    return Call("GET", "/v1/models", lambda response: [model.id for model in typed(_Models)(response).data])


def query(**fields: str | float | None) -> str:
    """The end of an address with these fields, without those that are None."""
    known = said(fields)
    return f"?{httpx.QueryParams(known)}" if known else ""

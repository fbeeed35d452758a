"""The calls of a race, one description per call. Parts describe theirs in the same form.

Invariant: a call is described once, for both clients. Arguments, defaults and docstring of a call are those of the
clients' method of the same name.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel
from typing_extensions import Unpack

from vllm_rollout.kernel.client.body import PromptLike, Redundancy, RolloutOptions, rollout_body, said, takes_options
from vllm_rollout.kernel.client.connection import adapter, parse
from vllm_rollout.kernel.http.answers import RolloutAnswer, RolloutEvent
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.rewards import NamedRewardEntry, NamedRewardsAnswer, RewardEntry, RewardsAnswer

T = TypeVar("T")

RewardLike = tuple[str, int, float] | Mapping[str, Any] | RewardEntry
"""(prompt_id, index, reward), or an object with these fields."""

NamedRewardLike = tuple[str, int, float] | Mapping[str, Any] | NamedRewardEntry
"""(request_id, index, reward), or an object with these fields or with `group_id` in place of the first."""


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


def post_rewards(rollout_id: str, rewards: Iterable[RewardLike], threshold: float | None = None) -> Call[RewardsAnswer]:
    """Post rewards of a rollout's trajectories: (prompt_id, index, reward) each. Safe to repeat.

    `threshold`: a reward above it is positive. None: the server's default, 0.5.

    Raises: RolloutError, 404 for an unknown rollout. TypeError for a reward of unknown form. ValueError for a reward
    that is not finite.
    """
    entries = [_entry(reward, position, "prompt_id") for position, reward in enumerate(rewards)]
    body = said({"rewards": entries, "threshold": threshold})
    return Call("POST", f"/v1/rollouts/{quote(rollout_id, safe='')}/rewards", typed(RewardsAnswer), body)


def post_named_rewards(
    rewards: Iterable[NamedRewardLike], threshold: float | None = None, namespace: str | None = None
) -> Call[NamedRewardsAnswer]:
    """Post rewards of candidates of any groups: (request_id, index, reward) each, or {"group_id": …, "index": …,
    "reward": …}. The request id is the id of an OpenAI answer, the index that of its choice. Safe to repeat.

    `threshold`: a reward above it is positive. None: the server's default. `namespace`: the requests'
    rollout_namespace.

    Raises: RolloutError. TypeError for a reward of unknown form. ValueError for a reward that is not finite.
    """
    entries = [_entry(reward, position, "request_id") for position, reward in enumerate(rewards)]
    body = said({"rewards": entries, "threshold": threshold, "namespace": namespace})
    return Call("POST", "/v1/rewards", typed(NamedRewardsAnswer), body)


def query(**fields: str | float | None) -> str:
    """The end of an address with these fields, without those that are None."""
    known = said(fields)
    return f"?{httpx.QueryParams(known)}" if known else ""


def _entry(reward: RewardLike | NamedRewardLike, position: int, name: str) -> dict[str, Any]:
    try:
        if isinstance(reward, BaseModel):
            entry = reward.model_dump(exclude_none=True)
        elif isinstance(reward, Mapping):
            entry = dict(reward)
        else:
            id, index, value = reward
            entry = {name: id, "index": index, "reward": value}
        # numpy and torch scalars are not JSON
        entry["reward"] = float(entry["reward"])
        if "index" in entry:
            entry["index"] = operator.index(entry["index"])
    except (TypeError, ValueError, KeyError) as error:
        raise TypeError(
            f"rewards[{position}] must be ({name}, index, reward) or a dict of these, got {reward!r:.80} ({error!r})"
        ) from error
    if not math.isfinite(entry["reward"]):
        raise ValueError(f"rewards[{position}].reward must be a finite number, got {entry['reward']}. Leave it out.")
    return entry

"""The calls of a server, one description per call.

Invariant: a call is described once, for both clients. Arguments, defaults and docstring of a call are those of the
clients' method of the same name.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter
from typing_extensions import Unpack

from vllm_rollout.kernel.client.body import PromptLike, Redundancy, RolloutOptions, rollout_body, said, takes_options
from vllm_rollout.kernel.client.connection import RolloutError, parse
from vllm_rollout.kernel.http.answers import RolloutAnswer
from vllm_rollout.kernel.http.engine import LearningReport
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.rewards import NamedRewardEntry, NamedRewardsAnswer, RewardEntry, RewardsAnswer
from vllm_rollout.parts.moving.http.body import (
    DEFAULT_DRAIN_S,
    AdviceAnswer,
    DrainAnswer,
    EngineAnswer,
    EnginesAnswer,
)
from vllm_rollout.parts.pruning.http.body import HEAD_HEADER, HeadAnswer
from vllm_rollout.parts.pruning.http.prompts import PromptsAnswer
from vllm_rollout.parts.pruning.http.votes import VoteAnswer
from vllm_rollout.parts.pruning.rules.known_prompts import PromptOrder
from vllm_rollout.parts.pruning.rules.length_trial import LengthTrialReport
from vllm_rollout.parts.pruning.rules.voting import VotingMethod

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


class QualityHead(NamedTuple):
    """A trained quality head, to keep or to put back."""

    head: HeadAnswer
    weights: bytes
    """The head as a safetensors file with metadata."""


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def typed(form: type[T]) -> Callable[[httpx.Response], T]:
    """A function that parses an answer as `form`."""

    def read(response: httpx.Response) -> T:
        answer: T = parse(_adapter(form), response.content)
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


def quality_head(detection_length: int | None = None, model: str | None = None) -> Call[QualityHead]:
    """The trained quality head. `detection_length`: in tokens. None: the only head. `model`: a LoRA adapter, by its
    served name.

    Raises: RolloutError, 404 while there is no head.
    """
    query = _query(detection_length=detection_length, model=model)
    return Call("GET", f"/v1/quality_head{query}", _read_quality_head)


def set_quality_head(weights: bytes, model: str | None = None) -> Call[HeadAnswer]:
    """Put a quality head in place. Raises: RolloutError, 409 for a head of another model or hidden size."""
    return Call("PUT", f"/v1/quality_head{_query(model=model)}", typed(HeadAnswer), bytes(weights))


def report(detection_length: int | None = None, model: str | None = None) -> Call[LearningReport]:
    """Report on the accuracy of calibration and quality head. Arguments as of `quality_head`.

    Raises: RolloutError, 404 while nothing was learned.
    """
    query = _query(detection_length=detection_length, model=model)
    return Call("GET", f"/v1/quality_head/report{query}", typed(LearningReport))


def detection_lengths(keep_ratio: float | None = None, model: str | None = None) -> Call[LengthTrialReport]:
    """Comparison and recommendation of detection lengths, from rollouts that named several of them.

    `keep_ratio`: of the pruning to compare for. None: the default of pruning. `model`: a LoRA adapter, by its served
    name.

    Raises: RolloutError.
    """
    query = _query(keep_ratio=keep_ratio, model=model)
    return Call("GET", f"/v1/quality_head/detection_lengths{query}", typed(LengthTrialReport))


def prompts(
    limit: int | None = None,
    after: str | None = None,
    sort: PromptOrder = "last_seen",
    model: str | None = None,
) -> Call[PromptsAnswer]:
    """One page of known prompts: lengths, success and last use of each.

    `limit`: prompts per page at most. `after`: the `key` of the last prompt of the page before. `sort`: "last_seen"
    (latest first) or "success" (lowest first, prompts without rewards last). `model`: a LoRA adapter, by its served
    name.

    Raises: RolloutError, 404 for an unknown `after`.
    """
    query = _query(limit=limit, after=after, sort=sort, model=model)
    return Call("GET", f"/v1/rollouts/prompts{query}", typed(PromptsAnswer))


def state() -> Call[bytes]:
    """The learned state, for a checkpoint: opaque bytes for `set_state`."""
    return Call("GET", "/v1/rollouts/state", lambda response: response.content)


def set_state(state: bytes) -> Call[None]:
    """Restore bytes from `state`. Raises: RolloutError, 409 for a state of another model."""
    return Call("PUT", "/v1/rollouts/state", lambda _: None, bytes(state))


def vote(
    answers: Sequence[str | None] | None = None,
    *,
    texts: Sequence[str | None] | None = None,
    answer_pattern: str | None = None,
    method: VotingMethod = "majority",
    weights: Sequence[float | None] | None = None,
    correct: str | None = None,
    k: int | None = None,
) -> Call[VoteAnswer]:
    """Vote on a group's answer, by its `answers` or by `texts` in which `answer_pattern` finds answers. None abstains.

    `method`: "majority", "confidence" or "quality". The latter two need `weights`, one per answer. With `correct` and
    `k` the result also has maj@k.

    Raises: RolloutError with the server's words.
    """
    body = {
        "answers": None if answers is None else list(answers),
        "texts": None if texts is None else list(texts),
        "answer_pattern": answer_pattern,
        "method": method,
        "weights": None if weights is None else [None if weight is None else float(weight) for weight in weights],
        "correct": correct,
        "k": k,
    }
    return Call("POST", "/v1/votes", typed(VoteAnswer), said(body))


def engines() -> Call[list[EngineAnswer]]:
    """State and load of each rank."""
    return Call("GET", "/v1/engines", lambda response: typed(EnginesAnswer)(response).engines)


def engines_advice() -> Call[AdviceAnswer]:
    """Advice whether half of the ranks could be freed now."""
    return Call("GET", "/v1/engines/advice", typed(AdviceAnswer))


def drain(rank: int, timeout_s: float = DEFAULT_DRAIN_S) -> Call[DrainAnswer]:
    """Move all groups of a rank to other ranks, and keep the rank empty until `restore`. Safe to repeat.

    `timeout_s`: longest wait in seconds for groups that cannot move. Raises: RolloutError, 409 for the last rank.
    """
    body = {"timeout_s": float(timeout_s)}
    return Call("POST", f"/v1/engines/{rank}/drain", typed(DrainAnswer), body, timeout=timeout_s + 60)


def restore(rank: int) -> Call[EngineAnswer]:
    """Let a drained rank take groups again. Safe to repeat."""
    return Call("POST", f"/v1/engines/{rank}/restore", typed(EngineAnswer))


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


def _query(**fields: str | float | None) -> str:
    query = said(fields)
    return f"?{httpx.QueryParams(query)}" if query else ""


def _read_quality_head(response: httpx.Response) -> QualityHead:
    if HEAD_HEADER not in response.headers:
        raise RolloutError(None, f"the answer has no header {HEAD_HEADER!r}: not a rollout server?", "UnexpectedAnswer")
    head = parse(_adapter(HeadAnswer), response.headers[HEAD_HEADER].encode())
    return QualityHead(head, response.content)

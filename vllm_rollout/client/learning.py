"""The endpoints that learn and vote, as methods of both clients. Invariant: a call is described once, for both."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter

from vllm_rollout.client.connection import RolloutError, parse
from vllm_rollout.group.voting import VotingMethod
from vllm_rollout.server.engine import LearningReport
from vllm_rollout.server.learning.body import HEAD_HEADER, HeadAnswer, RewardEntry, RewardsAnswer
from vllm_rollout.server.votes import VoteAnswer

T = TypeVar("T")

RewardLike = tuple[str, int, float] | Mapping[str, Any] | RewardEntry
"""(prompt_id, index, reward), or an object with these fields."""


class QualityHead(NamedTuple):
    """A trained head, to be kept or put back."""

    head: HeadAnswer
    weights: bytes
    """safetensors with metadata."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and how its answer is read."""

    method: str
    path: str
    body: object
    read: Callable[[httpx.Response], T]


def _typed(form: type[T]) -> Callable[[httpx.Response], T]:
    adapter: TypeAdapter[T] = TypeAdapter(form)

    def read(response: httpx.Response) -> T:
        answer: T = parse(adapter, response.content)
        return answer

    return read


_read_rewards = _typed(RewardsAnswer)
_read_head = _typed(HeadAnswer)
_read_report = _typed(LearningReport)
_read_vote = _typed(VoteAnswer)


def rewards_call(rollout_id: str, rewards: Iterable[RewardLike], threshold: float | None) -> Call[RewardsAnswer]:
    """Raises: TypeError for a reward of no known form, ValueError for one that is not finite."""
    body: dict[str, Any] = {"rewards": [_entry(reward, position) for position, reward in enumerate(rewards)]}
    if threshold is not None:
        body["threshold"] = threshold
    return Call("POST", f"/v1/rollouts/{quote(rollout_id, safe='')}/rewards", body, _read_rewards)


def head_call(detection_length: int | None) -> Call[QualityHead]:
    return Call("GET", f"/v1/quality_head{_query(detection_length)}", None, _read_quality_head)


def set_head_call(weights: bytes) -> Call[HeadAnswer]:
    return Call("PUT", "/v1/quality_head", bytes(weights), _read_head)


def report_call(detection_length: int | None) -> Call[LearningReport]:
    return Call("GET", f"/v1/quality_head/report{_query(detection_length)}", None, _read_report)


def state_call() -> Call[bytes]:
    return Call("GET", "/v1/rollouts/state", None, lambda response: response.content)


def set_state_call(state: bytes) -> Call[None]:
    return Call("PUT", "/v1/rollouts/state", bytes(state), lambda _: None)


def vote_call(
    answers: Sequence[str | None] | None,
    texts: Sequence[str | None] | None,
    answer_pattern: str | None,
    method: VotingMethod,
    weights: Sequence[float | None] | None,
    correct: str | None,
    k: int | None,
) -> Call[VoteAnswer]:
    body = {
        "answers": None if answers is None else list(answers),
        "texts": None if texts is None else list(texts),
        "answer_pattern": answer_pattern,
        "method": method,
        "weights": None if weights is None else [None if weight is None else float(weight) for weight in weights],
        "correct": correct,
        "k": k,
    }
    return Call("POST", "/v1/votes", {field: value for field, value in body.items() if value is not None}, _read_vote)


class LearningMethods:
    """What the sync client offers beside rollouts."""

    _call: Callable[[Call[Any]], Any]

    def post_rewards(
        self, rollout_id: str, rewards: Iterable[RewardLike], threshold: float | None = None
    ) -> RewardsAnswer:
        """Say what a rollout's trajectories were worth: (prompt_id, index, reward) each. Safe to repeat.

        `threshold`: a reward above it is positive; None: the server's default, 0.5.

        Raises: RolloutError, 404 when the rollout is not known; TypeError for a reward of no known form; ValueError for
        one that is not finite.
        """
        return self._call(rewards_call(rollout_id, rewards, threshold))

    def quality_head(self, detection_length: int | None = None) -> QualityHead:
        """The trained head; None: the only one there is. Raises: RolloutError, 404 while there is none."""
        return self._call(head_call(detection_length))

    def set_quality_head(self, weights: bytes) -> HeadAnswer:
        """Put a head in place. Raises: RolloutError, 409 for one of another model or hidden size."""
        return self._call(set_head_call(weights))

    def report(self, detection_length: int | None = None) -> LearningReport:
        """What calibration and head are worth. Raises: RolloutError, 404 while nothing was learned."""
        return self._call(report_call(detection_length))

    def state(self) -> bytes:
        """All that was learned, for a checkpoint: opaque bytes for `set_state`."""
        return self._call(state_call())

    def set_state(self, state: bytes) -> None:
        """Restore what `state` gave. Raises: RolloutError, 409 for a state of another model."""
        self._call(set_state_call(state))

    def vote(
        self,
        answers: Sequence[str | None] | None = None,
        *,
        texts: Sequence[str | None] | None = None,
        answer_pattern: str | None = None,
        method: VotingMethod = "majority",
        weights: Sequence[float | None] | None = None,
        correct: str | None = None,
        k: int | None = None,
    ) -> VoteAnswer:
        """What a group answered: by its `answers`, or by `texts` in which `answer_pattern` finds them; None abstains.

        `method`: "majority", "confidence" or "quality", the latter two with `weights`. With `correct` and `k` also
        maj@k. Raises: RolloutError with the server's words.
        """
        return self._call(vote_call(answers, texts, answer_pattern, method, weights, correct, k))


class AsyncLearningMethods:
    """What the async client offers beside rollouts."""

    _call: Callable[[Call[Any]], Any]

    async def post_rewards(
        self, rollout_id: str, rewards: Iterable[RewardLike], threshold: float | None = None
    ) -> RewardsAnswer:
        """See `RolloutClient.post_rewards`."""
        return await self._call(rewards_call(rollout_id, rewards, threshold))

    async def quality_head(self, detection_length: int | None = None) -> QualityHead:
        """See `RolloutClient.quality_head`."""
        return await self._call(head_call(detection_length))

    async def set_quality_head(self, weights: bytes) -> HeadAnswer:
        """See `RolloutClient.set_quality_head`."""
        return await self._call(set_head_call(weights))

    async def report(self, detection_length: int | None = None) -> LearningReport:
        """See `RolloutClient.report`."""
        return await self._call(report_call(detection_length))

    async def state(self) -> bytes:
        """See `RolloutClient.state`."""
        return await self._call(state_call())

    async def set_state(self, state: bytes) -> None:
        """See `RolloutClient.set_state`."""
        await self._call(set_state_call(state))

    async def vote(
        self,
        answers: Sequence[str | None] | None = None,
        *,
        texts: Sequence[str | None] | None = None,
        answer_pattern: str | None = None,
        method: VotingMethod = "majority",
        weights: Sequence[float | None] | None = None,
        correct: str | None = None,
        k: int | None = None,
    ) -> VoteAnswer:
        """See `RolloutClient.vote`."""
        return await self._call(vote_call(answers, texts, answer_pattern, method, weights, correct, k))


def _entry(reward: RewardLike, position: int) -> dict[str, Any]:
    try:
        if isinstance(reward, RewardEntry):
            entry = reward.model_dump()
        elif isinstance(reward, Mapping):
            entry = {**reward, "reward": float(reward["reward"])}
        else:
            prompt_id, index, value = reward
            # numpy and torch scalars are not JSON
            entry = {"prompt_id": prompt_id, "index": operator.index(index), "reward": float(value)}
    except (TypeError, ValueError, KeyError) as error:
        raise TypeError(
            f"rewards[{position}] must be (prompt_id, index, reward) or a dict of these, got {reward!r:.80} ({error!r})"
        ) from error
    if not math.isfinite(entry["reward"]):
        raise ValueError(f"rewards[{position}].reward must be a finite number, got {entry['reward']}. Leave it out.")
    return entry


def _query(detection_length: int | None) -> str:
    return "" if detection_length is None else f"?detection_length={detection_length}"


def _read_quality_head(response: httpx.Response) -> QualityHead:
    if HEAD_HEADER not in response.headers:
        raise RolloutError(None, f"the answer has no header {HEAD_HEADER!r}: not a rollout server?", "UnexpectedAnswer")
    head = parse(TypeAdapter(HeadAnswer), response.headers[HEAD_HEADER].encode())
    return QualityHead(head, response.content)

"""Calls about what is learned: quality heads, reports, known prompts, the state and votes.

Invariant: as in `kernel/client/calls.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import httpx

from vllm_rollout.kernel.client.blocking import Blocked, blocking
from vllm_rollout.kernel.client.body import said
from vllm_rollout.kernel.client.calls import Call, query, typed
from vllm_rollout.kernel.client.connection import RolloutError, adapter, parse
from vllm_rollout.kernel.client.methods import ClientPart, awaited
from vllm_rollout.kernel.client.sender import Sender
from vllm_rollout.parts.pruning.http.body import HEAD_HEADER, HeadAnswer
from vllm_rollout.parts.pruning.http.prompts import PromptsAnswer
from vllm_rollout.parts.pruning.http.votes import VoteAnswer
from vllm_rollout.parts.pruning.rules.known_prompts import PromptOrder
from vllm_rollout.parts.pruning.rules.learning_report import LearningReport
from vllm_rollout.parts.pruning.rules.length_trial import LengthTrialReport
from vllm_rollout.parts.pruning.rules.voting import VotingMethod


class QualityHead(NamedTuple):
    """A trained quality head, to keep or to put back."""

    head: HeadAnswer
    weights: bytes
    """The head as a safetensors file with metadata."""


def quality_head(detection_length: int | None = None, model: str | None = None) -> Call[QualityHead]:
    """The trained quality head. `detection_length`: in tokens. None: the only head. `model`: a LoRA adapter, by its
    served name.

    Raises: RolloutError, 404 while there is no head.
    """
    fields = query(detection_length=detection_length, model=model)
    return Call("GET", f"/v1/quality_head{fields}", _read_quality_head)


def set_quality_head(weights: bytes, model: str | None = None) -> Call[HeadAnswer]:
    """Put a quality head in place. Raises: RolloutError, 409 for a head of another model or hidden size."""
    return Call("PUT", f"/v1/quality_head{query(model=model)}", typed(HeadAnswer), bytes(weights))


def report(detection_length: int | None = None, model: str | None = None) -> Call[LearningReport]:
    """Report on the accuracy of calibration and quality head. Arguments as of `quality_head`.

    Raises: RolloutError, 404 while nothing was learned.
    """
    fields = query(detection_length=detection_length, model=model)
    return Call("GET", f"/v1/quality_head/report{fields}", typed(LearningReport))


def detection_lengths(keep_ratio: float | None = None, model: str | None = None) -> Call[LengthTrialReport]:
    """Comparison and recommendation of detection lengths, from rollouts that named several of them.

    `keep_ratio`: of the pruning to compare for. None: the default of pruning. `model`: a LoRA adapter, by its served
    name.

    Raises: RolloutError.
    """
    fields = query(keep_ratio=keep_ratio, model=model)
    return Call("GET", f"/v1/quality_head/detection_lengths{fields}", typed(LengthTrialReport))


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
    fields = query(limit=limit, after=after, sort=sort, model=model)
    return Call("GET", f"/v1/rollouts/prompts{fields}", typed(PromptsAnswer))


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


def _read_quality_head(response: httpx.Response) -> QualityHead:
    if HEAD_HEADER not in response.headers:
        raise RolloutError(None, f"the answer has no header {HEAD_HEADER!r}: not a rollout server?", "UnexpectedAnswer")
    head = parse(adapter(HeadAnswer), response.headers[HEAD_HEADER].encode())
    return QualityHead(head, response.content)


class AsyncLearningCalls(Sender):
    """Methods of the async client."""

    quality_head = awaited(quality_head)
    set_quality_head = awaited(set_quality_head)
    report = awaited(report)
    detection_lengths = awaited(detection_lengths)
    prompts = awaited(prompts)
    state = awaited(state)
    set_state = awaited(set_state)
    vote = awaited(vote)


class LearningCalls(Blocked):
    """Methods of the sync client."""

    quality_head = blocking(AsyncLearningCalls.quality_head)
    set_quality_head = blocking(AsyncLearningCalls.set_quality_head)
    report = blocking(AsyncLearningCalls.report)
    detection_lengths = blocking(AsyncLearningCalls.detection_lengths)
    prompts = blocking(AsyncLearningCalls.prompts)
    state = blocking(AsyncLearningCalls.state)
    set_state = blocking(AsyncLearningCalls.set_state)
    vote = blocking(AsyncLearningCalls.vote)


CLIENT = ClientPart(AsyncLearningCalls, LearningCalls)

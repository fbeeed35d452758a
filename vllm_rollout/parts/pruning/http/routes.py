"""The endpoints that learn: rewards, quality head, state (docs/reference/http.md). Invariant: as of routes.py."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import TypeAdapter

from vllm_rollout.config import (
    HISTORY_KEY_CHARS,
    MAX_BODY_BYTES,
    MAX_DETECTION_LENGTH,
)
from vllm_rollout.kernel.http.admin import require_admin
from vllm_rollout.kernel.http.body import limits
from vllm_rollout.kernel.http.boundary import RolloutRoute
from vllm_rollout.kernel.http.errors import CHANGE_ERRORS, ERRORS, errors_of
from vllm_rollout.kernel.http.serialised import json_response
from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.parts.pruning.http import votes
from vllm_rollout.parts.pruning.http.body import HEAD_HEADER, HeadAnswer
from vllm_rollout.parts.pruning.http.plan import LearningPlan
from vllm_rollout.parts.pruning.http.prompts import DEFAULT_PAGE, MAX_PAGE, PromptsAnswer
from vllm_rollout.parts.pruning.http.service import LearningService
from vllm_rollout.parts.pruning.http.votes import VoteAnswer, VoteRequest
from vllm_rollout.parts.pruning.rules.fields import SHARE
from vllm_rollout.parts.pruning.rules.known_prompts import PromptOrder
from vllm_rollout.parts.pruning.rules.learning_report import LearningReport
from vllm_rollout.parts.pruning.rules.length_trial import DEFAULT_KEEP_RATIO, LengthTrialReport
from vllm_rollout.parts.pruning.rules.pruning_plan import WHOLE

BYTES = "application/octet-stream"

BYTES_SCHEMA: dict[str, Any] = {BYTES: {"schema": {"type": "string", "format": "binary"}}}
_REPORT = TypeAdapter(LearningReport)
_LENGTH_TRIAL = TypeAdapter(LengthTrialReport)
CONFLICTS = ERRORS | errors_of(409)
PUT_ERRORS = CHANGE_ERRORS | errors_of(507)
"""Errors of a PUT. With --rollout-state, the state is on disk before the answer is sent."""

DetectionLength = Annotated[
    int | None,
    Query(
        ge=WHOLE,
        le=MAX_DETECTION_LENGTH,
        description=f"Detection length of the head. {WHOLE}: the head of whole trajectories. "
        "Default: the only other head.",
    ),
]

ServedName = Annotated[
    str | None,
    Query(min_length=1, description="Name of the base model or of a LoRA adapter. Default: the base model."),
]

router = APIRouter(route_class=RolloutRoute, tags=["learning"])
vote_router = APIRouter(route_class=RolloutRoute)
ROUTES = {10: vote_router, 20: router}


def _learning(request: Request) -> LearningService:
    service: RolloutService = request.app.state.rollout_service
    return service.part(LearningPlan).learning


@router.get(
    "/v1/quality_head",
    summary="The weights of a quality head",
    response_class=Response,
    responses={
        **CONFLICTS,
        200: {
            "description": "safetensors with metadata.",
            "content": BYTES_SCHEMA,
            "headers": {
                HEAD_HEADER: {
                    "description": "Detection length, size, version, steps, labels and adapter, as JSON.",
                    "schema": {"type": "string"},
                },
            },
        },
    },
)
async def get_quality_head(
    request: Request, detection_length: DetectionLength = None, model: ServedName = None
) -> Response:
    """Read the weights of a quality head, as safetensors.

    404 if no head is trained. 409 if there are several and the query does not name one.
    """
    head, weights = await _learning(request).quality_head(detection_length, model)
    described = json.dumps(HeadAnswer.of(head).model_dump())  # in ASCII, whatever an adapter is called
    return Response(weights, media_type=BYTES, headers={HEAD_HEADER: described})


@router.put(
    "/v1/quality_head",
    summary="Replace a quality head",
    description="Send the bytes of the GET. Their metadata names the detection length. 400: the body is no head. "
    f"409: the head is for another model or hidden size. At most {MAX_BODY_BYTES} bytes.",
    response_model=HeadAnswer,
    responses=PUT_ERRORS,
    dependencies=[Depends(require_admin)],
    openapi_extra={"requestBody": {"required": True, "content": BYTES_SCHEMA}},
)
async def put_quality_head(request: Request, model: ServedName = None) -> HeadAnswer:
    return HeadAnswer.of(await _learning(request).set_quality_head(await request.body(), model))


@router.get(
    "/v1/quality_head/report",
    summary="Quality of calibration and quality head",
    response_model=LearningReport,
    responses=CONFLICTS,
)
async def get_report(request: Request, detection_length: DetectionLength = None, model: ServedName = None) -> Response:
    """Read how good calibration and quality head are.

    The report has AUC, Brier score, reliability bins and label counts by signal, and the loss of each version of the
    head. `active` and `shadow` describe what pruning did, or would have done, to rewarded candidates.
    """
    report = await _learning(request).report(detection_length, model)
    return Response(_REPORT.dump_json(report), media_type="application/json")


@router.get(
    "/v1/quality_head/detection_lengths",
    summary="Comparison of detection lengths",
    description="""The comparison is from rollouts that named several lengths (`"detection_length": [16, 48, 128]`).
Each length has its AUC with a standard error. `cost_ratio` is the share of all tokens that must be generated before
a candidate can be stopped. `saving_ratio` is the share of tokens saved if `1 - keep_ratio` of the candidates at
that length are stopped. The value of a length is `saving_ratio * (2 AUC - 1)`. `recommended` is the shortest length
within a standard error of the best. It is null, with a `reason`, while too little is known. `"detection_length":
"auto"` uses it.""",
    response_model=LengthTrialReport,
    responses=ERRORS,
)
async def get_detection_lengths(
    request: Request,
    keep_ratio: Annotated[
        float, Query(**limits(SHARE), description="Share of candidates that pruning would keep.")
    ] = DEFAULT_KEEP_RATIO,
    model: ServedName = None,
) -> Response:
    report = await _learning(request).length_trial(keep_ratio, model)
    return Response(_LENGTH_TRIAL.dump_json(report), media_type="application/json")


@router.get(
    "/v1/rollouts/prompts",
    summary="Statistics of each prompt",
    description="""A trainer can use these statistics to leave out prompts that are solved or hopeless. Each prompt has
lengths over its groups, success over its rewarded candidates, and `prompts_ago`. `sort` is `last_seen` (the most recent
prompt first) or `success` (the least successful prompt first, prompts without rewards last). For the next page, `after`
is the `key` of the last prompt of this page.""",
    response_model=PromptsAnswer,
    responses=ERRORS,
)
async def get_prompts(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="Prompts in a page.")] = DEFAULT_PAGE,
    after: Annotated[
        str | None,
        Query(
            min_length=1,
            max_length=HISTORY_KEY_CHARS,
            description="The `key` of the last prompt of the page before. 404 if the server has forgotten that prompt.",
        ),
    ] = None,
    sort: Annotated[
        PromptOrder,
        Query(
            description="`last_seen`: the most recent prompt first. `success`: the least successful prompt first, "
            "prompts without rewards last."
        ),
    ] = "last_seen",
    model: ServedName = None,
) -> Response:
    answer = await _learning(request).prompts(limit, after, sort, model)
    return Response(await asyncio.to_thread(answer.model_dump_json), media_type="application/json")


@vote_router.post(
    "/v1/votes",
    summary="Vote over the answers of a group",
    response_model=VoteAnswer,
    responses=ERRORS | errors_of(429),
)
async def create_vote(body: VoteRequest) -> Response:
    """Vote on the answer of a group of candidates: by majority, confidence or quality.

    The candidates are given as answers, or as texts in which a pattern finds the answer. With `correct` and `k` the
    vote also gives maj@k: how often the vote of k of these candidates is right.
    """
    return json_response(await votes.counter.count(body))

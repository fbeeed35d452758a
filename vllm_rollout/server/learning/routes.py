"""The endpoints that learn: rewards, quality head, state (docs/reference/http.md). Invariant: as of routes.py."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import TypeAdapter

from vllm_rollout.config import (
    HISTORY_KEY_CHARS,
    MAX_BODY_BYTES,
    MAX_DETECTION_LENGTH,
    MAX_STATE_BYTES,
    REWARD_THRESHOLD,
)
from vllm_rollout.group.judging.known_prompts import PromptOrder
from vllm_rollout.group.judging.length_trial import DEFAULT_KEEP_RATIO, LengthTrialReport
from vllm_rollout.group.plans.fields import SHARE
from vllm_rollout.group.types import WHOLE
from vllm_rollout.server.admin import require_admin
from vllm_rollout.server.body import limits
from vllm_rollout.server.boundary import RolloutRoute, StateRoute
from vllm_rollout.server.clients import client_namespace
from vllm_rollout.server.engine import LearningReport
from vllm_rollout.server.errors import CHANGE_ERRORS, ERRORS, errors_of
from vllm_rollout.server.learning.body import (
    HEAD_HEADER,
    HeadAnswer,
    NamedRewardsAnswer,
    NamedRewardsRequest,
    RewardsAnswer,
    RewardsRequest,
)
from vllm_rollout.server.learning.prompts import DEFAULT_PAGE, MAX_PAGE, PromptsAnswer
from vllm_rollout.server.learning.service import LearningService
from vllm_rollout.server.serialised import PartsResponse, filled, to_json
from vllm_rollout.server.slices import each

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
        description=f"Of which head. Default: the only one there is, beside {WHOLE}, the one of whole trajectories.",
    ),
]

ServedName = Annotated[
    str | None,
    Query(min_length=1, description="Of the base model or a LoRA adapter. Default: the base model."),
]

router = APIRouter(route_class=RolloutRoute, tags=["learning"])
state_router = APIRouter(route_class=StateRoute, tags=["learning"])


def _learning(request: Request) -> LearningService:
    service: LearningService = request.app.state.rollout_service.learning
    return service


async def _in_parts(answer: RewardsAnswer | NamedRewardsAnswer) -> Response:
    results = await each(answer.results, to_json)
    return PartsResponse(filled(answer.model_copy(update={"results": []}), "results", results))


@router.post(
    "/v1/rollouts/{rollout_id}/rewards",
    summary="What the trajectories of a rollout were worth",
    description=f"""Teaches calibration at once and the quality head in the background.

A reward above `threshold` ({REWARD_THRESHOLD} unless the body says otherwise) is positive, any other negative. Safe to
repeat: a (prompt_id, index) learns from its first reward; the same one again is a `duplicate`, another one a
`conflict`. Every entry gets a status of its own: `accepted`, `duplicate`, `conflict`, `unknown`, `unfinished` or
`unscored`, and unless accepted a message. Pruned candidates need no reward.""",
    response_model=RewardsAnswer,
    responses=CONFLICTS,
)
async def post_rewards(rollout_id: str, body: RewardsRequest, request: Request) -> Response:
    answer = await request.app.state.run_service.rewards.post(rollout_id, body, client_namespace())
    return await _in_parts(answer)


@router.post(
    "/v1/rewards",
    summary="What candidates of any groups were worth",
    description="""For groups behind the OpenAI endpoints and requests that joined a group, by the `id` of their answer
and the index of the choice (`request_id`, `index`), and for groups of rollouts by `group_id` and index; many of them in
one request. They learn if they were asked for with `rollout_detection_length` (or `pruning`). Statuses as above; a name
that no candidate is known by is `unknown`. Clients with different API keys do not name each other's requests.""",
    response_model=NamedRewardsAnswer,
    responses=ERRORS,
)
async def post_named_rewards(body: NamedRewardsRequest, request: Request) -> Response:
    answer = await request.app.state.run_service.rewards.post_named(body, client_namespace())
    return await _in_parts(answer)


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
                HEAD_HEADER: {"description": "What the head is for, as JSON.", "schema": {"type": "string"}},
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
    summary="Put a quality head in place",
    description="Takes what the GET gave; its metadata says for which detection length. 400 for what is no head, 409 "
    f"for one of another model or hidden size. At most {MAX_BODY_BYTES} bytes.",
    response_model=HeadAnswer,
    responses=PUT_ERRORS,
    dependencies=[Depends(require_admin)],
    openapi_extra={"requestBody": {"required": True, "content": BYTES_SCHEMA}},
)
async def put_quality_head(request: Request, model: ServedName = None) -> HeadAnswer:
    return HeadAnswer.of(await _learning(request).set_quality_head(await request.body(), model))


@router.get(
    "/v1/quality_head/report",
    summary="What calibration and quality head are worth",
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
    summary="Which detection length is best",
    description="""What rollouts that named several lengths (`"detection_length": [16, 48, 128]`) say of them: at each
AUC with its standard error, the share of all tokens that has to be generated before anybody can be stopped
(`cost_ratio`), the share that is saved when `1 - keep_ratio` of those that get there are stopped (`saving_ratio`), and
what that is worth, `saving_ratio * (2 AUC - 1)`. `recommended` is the shortest length within a standard error of the
best, null with a `reason` while too little is known; `"detection_length": "auto"` uses it.""",
    response_model=LengthTrialReport,
    responses=ERRORS,
)
async def get_detection_lengths(
    request: Request,
    keep_ratio: Annotated[float, Query(**limits(SHARE), description="Of the pruning that is considered.")] = (
        DEFAULT_KEEP_RATIO
    ),
    model: ServedName = None,
) -> Response:
    report = await _learning(request).length_trial(keep_ratio, model)
    return Response(_LENGTH_TRIAL.dump_json(report), media_type="application/json")


@router.get(
    "/v1/rollouts/prompts",
    summary="What is known of each prompt",
    description="""Lengths over its groups, success over its rewarded candidates, and how long ago it was seen: for a
trainer that leaves out what is solved or hopeless. `sort` is `last_seen` (the last one first) or `success` (the least
successful first, without rewards last). The next page: `after` is the `key` of the last prompt of this one.""",
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
            description="`last_seen`: the last one first. `success`: the least successful first, without rewards last."
        ),
    ] = "last_seen",
    model: ServedName = None,
) -> Response:
    answer = await _learning(request).prompts(limit, after, sort, model)
    return Response(await asyncio.to_thread(answer.model_dump_json), media_type="application/json")


@router.get(
    "/v1/rollouts/state",
    summary="All that was learned, and all runs",
    response_class=Response,
    responses={**ERRORS, 200: {"description": "Opaque bytes, for the PUT.", "content": BYTES_SCHEMA}},
)
async def get_state(request: Request) -> Response:
    """Read everything learned and all runs as opaque bytes, for a trainer's checkpoint: calibration, heads with
    their optimizers, lengths, runs."""
    return Response(await request.app.state.run_service.state(), media_type=BYTES)


@state_router.put(
    "/v1/rollouts/state",
    summary="Restore all that was learned",
    description=f"Takes the bytes of the GET as they are, at most {MAX_STATE_BYTES}, in place of what was learned "
    "since and of all runs. 400 for what is no state, 409 for one of another model and while a round runs.",
    status_code=HTTPStatus.NO_CONTENT,
    response_class=Response,
    responses=PUT_ERRORS,
    dependencies=[Depends(require_admin)],
    openapi_extra={"requestBody": {"required": True, "content": BYTES_SCHEMA}},
)
async def put_state(request: Request) -> Response:
    await request.app.state.run_service.set_state(await request.body())
    return Response(status_code=HTTPStatus.NO_CONTENT)

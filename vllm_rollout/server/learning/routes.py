"""The endpoints that learn: rewards, quality head, state (docs/http.md). Invariant: as of routes.py."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import TypeAdapter

from vllm_rollout.config import MAX_BODY_BYTES, MAX_DETECTION_LENGTH, MAX_STATE_BYTES, REWARD_THRESHOLD
from vllm_rollout.server.admin import require_admin
from vllm_rollout.server.answers import ErrorAnswer
from vllm_rollout.server.boundary import RolloutRoute, StateRoute
from vllm_rollout.server.engine import LearningReport
from vllm_rollout.server.errors import ERRORS
from vllm_rollout.server.learning.body import HEAD_HEADER, HeadAnswer, RewardsAnswer, RewardsRequest
from vllm_rollout.server.learning.service import LearningService
from vllm_rollout.server.serialised import PartsResponse, filled, in_slices

BYTES = "application/octet-stream"

BYTES_SCHEMA: dict[str, Any] = {BYTES: {"schema": {"type": "string", "format": "binary"}}}
_REPORT = TypeAdapter(LearningReport)
CONFLICTS = {**ERRORS, int(HTTPStatus.CONFLICT): {"model": ErrorAnswer}}
ADMIN_ERRORS = {**CONFLICTS, int(HTTPStatus.UNAUTHORIZED): {"model": ErrorAnswer}}
"""Of what needs --rollout-admin-key where the server was given one."""

DetectionLength = Annotated[
    int | None,
    Query(ge=1, le=MAX_DETECTION_LENGTH, description="Of which head. Default: the only one there is."),
]

router = APIRouter(route_class=RolloutRoute, tags=["learning"])
state_router = APIRouter(route_class=StateRoute, tags=["learning"])


def _learning(request: Request) -> LearningService:
    service: LearningService = request.app.state.rollout_service.learning
    return service


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
    answer = await request.app.state.run_service.post_rewards(rollout_id, body)
    return PartsResponse(filled(answer.model_copy(update={"results": []}), "results", await in_slices(answer.results)))


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
async def get_quality_head(request: Request, detection_length: DetectionLength = None) -> Response:
    """404 while none is trained; 409 when there are several and the query does not say which."""
    head, weights = await _learning(request).quality_head(detection_length)
    return Response(weights, media_type=BYTES, headers={HEAD_HEADER: HeadAnswer.of(head).model_dump_json()})


@router.put(
    "/v1/quality_head",
    summary="Put a quality head in place",
    description="Takes what the GET gave; its metadata says for which detection length. 422 for what is no head, 409 "
    f"for one of another model or hidden size. At most {MAX_BODY_BYTES} bytes.",
    response_model=HeadAnswer,
    responses=ADMIN_ERRORS,
    dependencies=[Depends(require_admin)],
    openapi_extra={"requestBody": {"required": True, "content": BYTES_SCHEMA}},
)
async def put_quality_head(request: Request) -> HeadAnswer:
    return HeadAnswer.of(await _learning(request).set_quality_head(await request.body()))


@router.get(
    "/v1/quality_head/report",
    summary="What calibration and quality head are worth",
    response_model=LearningReport,
    responses=CONFLICTS,
)
async def get_report(request: Request, detection_length: DetectionLength = None) -> Response:
    """AUC, Brier score, reliability bins and label counts by signal, the loss of each version of the head, and what
    pruning did (`active`) or would have done (`shadow`) to rewarded candidates.
    """
    report = await _learning(request).report(detection_length)
    return Response(_REPORT.dump_json(report), media_type="application/json")


@router.get(
    "/v1/rollouts/state",
    summary="All that was learned, and all runs",
    response_class=Response,
    responses={**ERRORS, 200: {"description": "Opaque bytes, for the PUT.", "content": BYTES_SCHEMA}},
)
async def get_state(request: Request) -> Response:
    """For a trainer's checkpoint: calibration, heads and their optimizers, lengths, runs, as opaque bytes."""
    return Response(await request.app.state.run_service.state(), media_type=BYTES)


@state_router.put(
    "/v1/rollouts/state",
    summary="Restore all that was learned",
    description=f"Takes the bytes of the GET as they are, at most {MAX_STATE_BYTES}, in place of what was learned "
    "since and of all runs. 422 for what is no state, 409 for one of another model and while a round runs.",
    status_code=HTTPStatus.NO_CONTENT,
    response_class=Response,
    responses=ADMIN_ERRORS,
    dependencies=[Depends(require_admin)],
    openapi_extra={"requestBody": {"required": True, "content": BYTES_SCHEMA}},
)
async def put_state(request: Request) -> Response:
    await request.app.state.run_service.set_state(await request.body())
    return Response(status_code=HTTPStatus.NO_CONTENT)

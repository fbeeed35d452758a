"""Endpoints about new weights: KV that older ones have computed, and the names of adapters' weights
(docs/guides/asynchronous.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, Field, StrictStr

from vllm_rollout.kernel.call_table import RECOMPUTE
from vllm_rollout.kernel.http.admin import require_admin
from vllm_rollout.kernel.http.body import Body
from vllm_rollout.kernel.http.boundary import RolloutRoute
from vllm_rollout.kernel.http.engine import Engine, RequestError
from vllm_rollout.kernel.http.errors import ERRORS, errors_of
from vllm_rollout.kernel.http.serialised import json_response
from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.kernel.rules.request_names import names_of_request
from vllm_rollout.kernel.rules.types import BASE_MODEL

router = APIRouter(route_class=RolloutRoute, tags=["weights"])
ROUTES = {70: router}

MAX_REQUEST_IDS = 4096


class RecomputeRequest(Body):
    """Groups whose KV is computed again."""

    request_ids: list[str] | None = Field(
        default=None,
        max_length=MAX_REQUEST_IDS,
        description="Ids of rollouts, or of requests with `n`, as in `X-Request-Id` or in an answer. Default: all "
        "groups.",
    )


class AdapterVersionRequest(Body):
    """A name for an adapter's new weights."""

    adapter: Annotated[StrictStr, Field(min_length=1)] = Field(description="Served name of the adapter.")
    version: Annotated[StrictStr, Field(min_length=1)] = Field(
        description="Name of its weights, as in `weight_versions` of trajectories."
    )


ALL = RecomputeRequest()


class RecomputeAnswer(BaseModel):
    object: Literal["weights.recompute"] = "weights.recompute"
    num_candidates: int
    """Candidates that compute their KV again."""


@router.post(
    "/v1/weights/recompute",
    summary="Recompute KV of older weights",
    response_model=RecomputeAnswer,
    responses=ERRORS | errors_of(401),
    dependencies=[Depends(require_admin)],
)
async def recompute(request: Request, body: RecomputeRequest = ALL) -> Response:
    """After a weights update, compute the KV of running groups again with the newest weights.

    This concerns candidates of groups that began under older weights. They compute their prompt and their tokens again
    before they go on. Other requests go on undisturbed, and the prefix cache is kept.
    """
    service: RolloutService = request.app.state.rollout_service
    return json_response(RecomputeAnswer(num_candidates=await recomputed(service.engine, body.request_ids)))


@router.post(
    "/v1/weights/adapter_version",
    summary="Name an adapter's weights",
    status_code=204,
    responses=ERRORS | errors_of(401, 404),
    dependencies=[Depends(require_admin)],
)
async def name_adapter(request: Request, body: AdapterVersionRequest) -> Response:
    """Name the newest weights of an adapter. `/update_weight_version` names those of all models."""
    service: RolloutService = request.app.state.rollout_service
    if (adapter := service.engine.adapter_name(body.adapter)) == BASE_MODEL:
        raise RequestError(
            f"adapter: {body.adapter!r} is the base model. Name its weights by POST /update_weight_version.",
            param="adapter",
        )
    await service.engine.name_adapter(adapter, body.version)
    return Response(status_code=204)


async def recomputed(engine: Engine, ids: Iterable[str] | None) -> int:
    """Compute KV of older weights again, for groups with these ids of requests, or for all. Returns the number of
    candidates that do so.
    """
    names = None if ids is None else sorted(set().union(*map(names_of_request, ids)))
    return sum(await engine.calls.tell_groups(RECOMPUTE, names))

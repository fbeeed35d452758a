"""The endpoints about ranks (docs/http.md). Invariant: as of routes.py."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from vllm_rollout.server.admin import require_admin
from vllm_rollout.server.answers import ErrorAnswer
from vllm_rollout.server.boundary import RolloutRoute
from vllm_rollout.server.engines.body import AdviceAnswer, DrainAnswer, DrainRequest, EngineAnswer, EnginesAnswer
from vllm_rollout.server.engines.service import EnginesService
from vllm_rollout.server.errors import ERRORS
from vllm_rollout.server.event_stream import CLIENT_CLOSED_REQUEST, unless_disconnected

router = APIRouter(route_class=RolloutRoute, tags=["engines"])

MAX_RANK = 1 << 16
Rank = Annotated[int, Path(ge=0, le=MAX_RANK, description="Of the engine, from 0.")]
DEFAULT_DRAIN = DrainRequest()
CHANGE_ERRORS = {
    **ERRORS,
    int(HTTPStatus.CONFLICT): {"model": ErrorAnswer},
    int(HTTPStatus.UNAUTHORIZED): {"model": ErrorAnswer},
}


def _service(request: Request) -> EnginesService:
    service: EnginesService = request.app.state.engines_service
    return service


@router.get("/v1/engines", summary="All ranks and their load", response_model=EnginesAnswer, responses=ERRORS)
async def get_engines(request: Request) -> Response:
    """One engine per data-parallel rank: what it has to do, and whether it is kept empty."""
    return _json(await _service(request).engines())


@router.get("/v1/engines/advice", summary="Whether ranks could be freed", response_model=AdviceAnswer, responses=ERRORS)
async def get_advice(request: Request) -> Response:
    """For a trainer that wants ranks before a rollout is over: half of them, when 20 to 50 % of the candidates have
    ended and the rest fits on the other half. `drain` frees them; `"scale_down": "auto"` does it by itself.
    """
    return _json(await _service(request).advice())


@router.post(
    "/v1/engines/{rank}/drain",
    summary="Empty a rank and keep it empty",
    response_model=DrainAnswer,
    responses=CHANGE_ERRORS,
    dependencies=[Depends(require_admin)],
)
async def drain_engine(rank: Rank, request: Request, body: DrainRequest = DEFAULT_DRAIN) -> Response:
    """Groups go on elsewhere, without losing a token; nothing new is sent to the rank until it is restored.

    Answers when the rank is empty, or after `timeout_s`. Safe to repeat. What cannot move runs to its end: requests
    outside of groups, and groups for one of the `reasons`. 409 for the last rank that takes groups.
    """
    drained = await unless_disconnected(request.receive, _service(request).drain(rank, body))
    return Response(status_code=CLIENT_CLOSED_REQUEST) if drained is None else _json(drained)


@router.post(
    "/v1/engines/{rank}/restore",
    summary="Send groups to a rank again",
    response_model=EngineAnswer,
    responses=CHANGE_ERRORS,
    dependencies=[Depends(require_admin)],
)
async def restore_engine(rank: Rank, request: Request) -> Response:
    """Undoes a drain. Safe to repeat, also for a rank that was not drained."""
    return _json(await _service(request).restore(rank))


def _json(answer: EnginesAnswer | EngineAnswer | DrainAnswer | AdviceAnswer) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")

"""The endpoints about ranks: their load, and emptying them (docs/reference/http.md).

Invariant: some rank always takes groups.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from vllm_rollout.kernel.http.admin import require_admin
from vllm_rollout.kernel.http.boundary import RolloutRoute
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.errors import CHANGE_ERRORS, ERRORS
from vllm_rollout.kernel.http.serialised import CLIENT_CLOSED_REQUEST, json_response, unless_disconnected
from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.parts.moving.http.body import (
    AdviceAnswer,
    DrainAnswer,
    DrainRequest,
    EngineAnswer,
    EnginesAnswer,
    ScaleDownAdvice,
    state_of,
)
from vllm_rollout.parts.moving.http.engine import MovesPart
from vllm_rollout.parts.moving.rules.scaling import Progress

router = APIRouter(route_class=RolloutRoute, tags=["engines"])
ROUTES = {50: router}

MAX_RANK = 1 << 16
Rank = Annotated[int, Path(ge=0, le=MAX_RANK, description="Number of the rank, from 0.")]
DEFAULT_DRAIN = DrainRequest()


def _service(request: Request) -> RolloutService:
    service: RolloutService = request.app.state.rollout_service
    return service


def _moves(rank: int, request: Request) -> MovesPart:
    """The part of the engine that moves groups. Raises: RequestError (404) if there is no such rank."""
    engine = _service(request).engine
    if rank >= engine.num_ranks:
        allowed = "only rank 0" if engine.num_ranks == 1 else f"ranks 0 to {engine.num_ranks - 1}"
        raise RequestError(
            f"there is no rank {rank}: this server has {allowed} (--data-parallel-size). See GET /v1/engines.",
            status=HTTPStatus.NOT_FOUND,
            param="rank",
        )
    return engine.part(MovesPart)


@router.get("/v1/engines", summary="All ranks and their load", response_model=EnginesAnswer, responses=ERRORS)
async def get_engines(request: Request) -> Response:
    """List the data-parallel ranks of the engine: their load, and whether they are kept empty."""
    states = await _service(request).engine.part(MovesPart).rank_states()
    return json_response(EnginesAnswer(engines=[EngineAnswer.of(rank, its) for rank, its in enumerate(states)]))


@router.get(
    "/v1/engines/advice", summary="Advice: could ranks be freed?", response_model=AdviceAnswer, responses=ERRORS
)
async def get_advice(request: Request) -> Response:
    """Ask whether half of the ranks could be freed before a rollout is over.

    That is advised if 20 to 50 % of the candidates have ended and the rest fits on the other ranks. `drain` then frees
    them. With `"scale_down": "auto"` a rollout does both by itself.
    """
    service = _service(request)
    rollouts = service.active.values()
    num_ended = sum(min(each.outcome.num_ended, each.num_responses) for each in rollouts)
    progress = Progress(sum(each.num_responses for each in rollouts), num_ended)
    advice = await service.engine.part(MovesPart).plan_scale_down(progress)
    answer = AdviceAnswer(
        num_responses=progress.num_responses,
        num_complete=progress.num_complete,
        scale_down=ScaleDownAdvice(reason=advice.reason, told=advice.explanation, ranks=list(advice.ranks)),
    )
    return json_response(answer)


@router.post(
    "/v1/engines/{rank}/drain",
    summary="Empty a rank and keep it empty",
    response_model=DrainAnswer,
    responses=CHANGE_ERRORS,
    dependencies=[Depends(require_admin)],
)
async def drain_engine(rank: Rank, request: Request, body: DrainRequest = DEFAULT_DRAIN) -> Response:
    """Move the groups of a rank to other ranks, without losing a token. Nothing new is sent to the rank until it is
    restored.

    The answer comes when the rank is empty, or after `timeout_s`. The request is safe to repeat. Some work cannot move
    and runs to its end: requests outside of groups, and groups for one of the `reasons`. 409 for the last rank that
    takes groups.
    """
    drained = await unless_disconnected(request.receive, _moves(rank, request).drain(rank, body.timeout_s))
    if drained is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    answer = DrainAnswer(
        rank=rank,
        state=state_of(drained.is_held, drained.num_left),
        num_moved=drained.num_moved,
        num_left=drained.num_left,
        reasons=dict(drained.reasons),
        seconds=drained.seconds,
    )
    return json_response(answer)


@router.post(
    "/v1/engines/{rank}/restore",
    summary="Send groups to a rank again",
    response_model=EngineAnswer,
    responses=CHANGE_ERRORS,
    dependencies=[Depends(require_admin)],
)
async def restore_engine(rank: Rank, request: Request) -> Response:
    """Undo a drain. Safe to repeat, also for a rank that was not drained."""
    moves = _moves(rank, request)
    await moves.restore(rank)
    return json_response(EngineAnswer.of(rank, (await moves.rank_states())[rank]))

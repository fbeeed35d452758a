"""The saved state: everything learned, and all runs. Invariant: as of kernel/http/routes.py."""

from __future__ import annotations

import asyncio
from functools import partial
from http import HTTPStatus

from fastapi import APIRouter, Depends, Request, Response

from vllm_rollout.config import MAX_STATE_BYTES
from vllm_rollout.kernel.http.admin import require_admin
from vllm_rollout.kernel.http.boundary import HeldBodies, RolloutRoute
from vllm_rollout.kernel.http.clients import client_namespace
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.errors import ERRORS
from vllm_rollout.parts.pruning.http.engine import LearningPart
from vllm_rollout.parts.pruning.http.routes import BYTES, BYTES_SCHEMA, PUT_ERRORS
from vllm_rollout.parts.pruning.http.service import not_empty
from vllm_rollout.parts.rounds.http.saved import SEND_AS_IT_IS, parse_saved, with_runs
from vllm_rollout.parts.rounds.http.service import RunService


class StateRoute(RolloutRoute):
    """A route for the bytes that `GET /v1/rollouts/state` gave."""

    held = HeldBodies(MAX_STATE_BYTES)
    max_body_bytes = MAX_STATE_BYTES
    too_large_remedy = "Send the bytes that GET /v1/rollouts/state gave, as they are."


router = APIRouter(route_class=RolloutRoute, tags=["learning"])
state_router = APIRouter(route_class=StateRoute, tags=["learning"])
ROUTES = {25: router, 30: state_router}


@router.get(
    "/v1/rollouts/state",
    summary="Learned state and all runs",
    response_class=Response,
    responses={**ERRORS, 200: {"description": "Opaque bytes, for the PUT.", "content": BYTES_SCHEMA}},
)
async def get_state(request: Request) -> Response:
    """Read everything learned and all runs as opaque bytes, for a trainer's checkpoint: calibration, heads with
    their optimizers, lengths, runs."""
    return Response(await state_of(request.app.state.run_service), media_type=BYTES)


@state_router.put(
    "/v1/rollouts/state",
    summary="Restore learned state and all runs",
    description=f"Send the bytes of the GET, at most {MAX_STATE_BYTES}. They replace learned state and all runs. "
    "400: the body is no state. 409: the state is of another model, or a round runs.",
    status_code=HTTPStatus.NO_CONTENT,
    response_class=Response,
    responses=PUT_ERRORS,
    dependencies=[Depends(require_admin)],
    openapi_extra={"requestBody": {"required": True, "content": BYTES_SCHEMA}},
)
async def put_state(request: Request) -> Response:
    await restore(request.app.state.run_service, await request.body())
    return Response(status_code=HTTPStatus.NO_CONTENT)


async def state_of(runs: RunService) -> bytes:
    """Everything learned, and all runs of this client, as bytes."""
    learned = await runs.engine.part(LearningPart).learning_state()
    return await asyncio.to_thread(with_runs, await runs.saved_runs(), learned)


async def restore(runs: RunService, state: bytes) -> None:
    """Replace everything learned, and all runs of this client.

    Raises: RequestError, 400 for no state, 409 for a state of another model and while a round runs. 503 and 507 if the
    database does not take it. Nothing has changed then.
    """
    not_empty(state, "the bytes of GET /v1/rollouts/state")
    try:
        saved = await asyncio.to_thread(parse_saved, state)
    except ValueError as error:
        raise RequestError(f"not a rollout state ({error}). {SEND_AS_IT_IS}") from error
    await runs.check_idle()
    keep = partial(runs.replace_runs, client_namespace(), saved.runs)
    await runs.engine.part(LearningPart).set_learning_state(saved.learned, keep)

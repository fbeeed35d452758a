"""Our HTTP endpoints. Invariant: endpoints only parse requests and send answers. The services make all decisions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from vllm_rollout.kernel.http import weights
from vllm_rollout.kernel.http.answers import RolloutAnswer, RolloutEvent
from vllm_rollout.kernel.http.boundary import RolloutRoute
from vllm_rollout.kernel.http.errors import ERRORS, ROLLOUT_ERRORS, errors_of
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.serialised import (
    CLIENT_CLOSED_REQUEST,
    EventStream,
    PartsResponse,
    event_stream_schema,
    json_response,
    server_sent_events,
    unless_disconnected,
)
from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.parts.moving.http import routes as engine_routes
from vllm_rollout.parts.page.http import routes as watch_routes
from vllm_rollout.parts.page.http.page import page_router
from vllm_rollout.parts.pruning.http import routes as learning_routes
from vllm_rollout.parts.pruning.http import votes
from vllm_rollout.parts.pruning.http.votes import VoteAnswer, VoteRequest
from vllm_rollout.parts.rounds.http import routes as run_routes
from vllm_rollout.parts.sessions.http import routes as session_routes

router = APIRouter(route_class=RolloutRoute, tags=["rollouts"])


@router.post(
    "/v1/rollouts",
    summary="Groups of trajectories for many prompts",
    response_model=RolloutAnswer,
    responses={
        **ROLLOUT_ERRORS,
        200: {
            "description": "The finished groups, in the order of the prompts. With `stream`: server-sent events.",
            "content": {"text/event-stream": event_stream_schema(RolloutEvent)},
        },
    },
)
async def create_rollout(body: RolloutRequest, request: Request) -> Response:
    """For every prompt run `group_size + redundancy` candidates and answer with `group_size` trajectories.

    With `early_stop` the others stop inside the engine in the step in which the group completes. With `pruning` the
    engine scores candidates at a detection length and stops those that will not help training. With `stream` the
    answer is a stream of server-sent events: `tokens`, `trajectory`, `candidate`, `group`, then `done` (or `error`).
    Each has one JSON object in `data`, whose `type` is the event's name.

    A request may name 16,384 prompts and 262,144 candidates. When the client leaves, its candidates are stopped. A
    stream that nobody reads for an hour ends.
    """
    service: RolloutService = request.app.state.rollout_service
    rollout = await service.prepare(body)
    if body.stream:
        return EventStream(server_sent_events(rollout.id, service.events(rollout)))
    parts = await unless_disconnected(request.receive, service.answer(rollout))
    return Response(status_code=CLIENT_CLOSED_REQUEST) if parts is None else PartsResponse(parts)


@router.post(
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


router.include_router(learning_routes.router)
router.include_router(learning_routes.state_router)
router.include_router(run_routes.router)
router.include_router(engine_routes.router)
router.include_router(session_routes.router)
router.include_router(weights.router)
router.include_router(watch_routes.router)
router.include_router(page_router())

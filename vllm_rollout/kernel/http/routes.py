"""Our HTTP endpoints. Those of a part come by its face `routes`: routers by position.

A position is a number. The OpenAPI document has the routers in the order of their positions, after POST /v1/rollouts.

Invariant: endpoints only parse requests and send answers. The services make all decisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

from fastapi import APIRouter, Request, Response

from vllm_rollout.kernel.http import reward_routes
from vllm_rollout.kernel.http.answers import RolloutAnswer, RolloutEvent
from vllm_rollout.kernel.http.boundary import RolloutRoute
from vllm_rollout.kernel.http.errors import ROLLOUT_ERRORS
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.serialised import (
    CLIENT_CLOSED_REQUEST,
    EventStream,
    PartsResponse,
    event_stream_schema,
    server_sent_events,
    unless_disconnected,
)
from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.kernel.parts import faces

REWARDS_POSITION = 15

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


def _routers() -> Iterator[tuple[int, APIRouter]]:
    yield REWARDS_POSITION, reward_routes.router
    for _, routers in faces("routes"):
        yield from routers.items()


for _, its_router in sorted(_routers(), key=itemgetter(0)):
    router.include_router(its_router)

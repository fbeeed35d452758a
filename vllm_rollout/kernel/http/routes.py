"""Our HTTP endpoints. Those of a part come by its face `routes`: routers by position.

A position is a number. The OpenAPI document has the routers in the order of their positions, after POST /v1/rollouts.

Invariant: endpoints only parse requests and send answers. The services make all decisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

from fastapi import APIRouter, Request, Response

from vllm_rollout.config import REWARD_THRESHOLD
from vllm_rollout.kernel.http.answers import RolloutAnswer, RolloutEvent
from vllm_rollout.kernel.http.boundary import RolloutRoute
from vllm_rollout.kernel.http.clients import client_namespace
from vllm_rollout.kernel.http.errors import ERRORS, ROLLOUT_ERRORS, errors_of
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.reward_door import RewardDoor
from vllm_rollout.kernel.http.rewards import NamedRewardsAnswer, NamedRewardsRequest, RewardsAnswer, RewardsRequest
from vllm_rollout.kernel.http.serialised import (
    CLIENT_CLOSED_REQUEST,
    EventStream,
    PartsResponse,
    event_stream_schema,
    filled,
    server_sent_events,
    to_json,
    unless_disconnected,
)
from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.kernel.http.slices import each
from vllm_rollout.kernel.parts import faces

REWARDS_POSITION = 15

router = APIRouter(route_class=RolloutRoute, tags=["rollouts"])
rewards_router = APIRouter(route_class=RolloutRoute, tags=["learning"])


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
    rollout.has_client = True
    if body.stream:
        return EventStream(server_sent_events(rollout.id, service.events(rollout)))
    parts = await unless_disconnected(request.receive, service.answer(rollout))
    return Response(status_code=CLIENT_CLOSED_REQUEST) if parts is None else PartsResponse(parts)


def _door(request: Request) -> RewardDoor:
    door: RewardDoor = request.app.state.rollout_service.rewards
    return door


async def _in_parts(answer: RewardsAnswer | NamedRewardsAnswer) -> Response:
    results = await each(answer.results, to_json)
    return PartsResponse(filled(answer.model_copy(update={"results": []}), "results", results))


@rewards_router.post(
    "/v1/rollouts/{rollout_id}/rewards",
    summary="Post rewards of a rollout's trajectories",
    description=f"""Calibration learns from the rewards at once, and the quality head in the background.

A reward above `threshold` ({REWARD_THRESHOLD} unless the body has another) is positive, any other negative. A
request may be repeated: a (prompt_id, index) learns from its first reward. The same reward again is a `duplicate`,
another reward is a `conflict`. Every entry gets a status: `accepted`, `duplicate`, `conflict`, `unknown`,
`unfinished` or `unscored`. Each status but `accepted` comes with a message. Pruned candidates need no reward.""",
    response_model=RewardsAnswer,
    responses=ERRORS | errors_of(409),
)
async def post_rewards(rollout_id: str, body: RewardsRequest, request: Request) -> Response:
    answer = await _door(request).post(rollout_id, body, client_namespace())
    return await _in_parts(answer)


@rewards_router.post(
    "/v1/rewards",
    summary="Post rewards of any groups' candidates",
    description="""One request can have rewards of many groups. A candidate of an OpenAI endpoint is named by the
`id` of its answer and the index of its choice (`request_id`, `index`). A candidate of a rollout is named by
`group_id` and `index`. Candidates are learned from if their request had `rollout_detection_length` (or `pruning`).
Statuses are as for the rewards of a rollout, and a name without a candidate is `unknown`. Clients with different
API keys cannot name each other's requests.""",
    response_model=NamedRewardsAnswer,
    responses=ERRORS,
)
async def post_named_rewards(body: NamedRewardsRequest, request: Request) -> Response:
    answer = await _door(request).post_named(body, client_namespace())
    return await _in_parts(answer)


def _routers() -> Iterator[tuple[int, APIRouter]]:
    yield REWARDS_POSITION, rewards_router
    for _, routers in faces("routes"):
        yield from routers.items()


for _, its_router in sorted(_routers(), key=itemgetter(0)):
    router.include_router(its_router)

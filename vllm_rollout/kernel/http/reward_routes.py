"""The endpoints where rewards are posted (docs/reference/http.md). Invariant: as of routes.py."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from vllm_rollout.config import REWARD_THRESHOLD
from vllm_rollout.kernel.http.boundary import RolloutRoute
from vllm_rollout.kernel.http.clients import client_namespace
from vllm_rollout.kernel.http.errors import ERRORS, errors_of
from vllm_rollout.kernel.http.reward_door import RewardDoor
from vllm_rollout.kernel.http.rewards import NamedRewardsAnswer, NamedRewardsRequest, RewardsAnswer, RewardsRequest
from vllm_rollout.kernel.http.serialised import PartsResponse, filled, to_json
from vllm_rollout.kernel.http.slices import each

router = APIRouter(route_class=RolloutRoute, tags=["learning"])


def _door(request: Request) -> RewardDoor:
    door: RewardDoor = request.app.state.rollout_service.rewards
    return door


async def _in_parts(answer: RewardsAnswer | NamedRewardsAnswer) -> Response:
    results = await each(answer.results, to_json)
    return PartsResponse(filled(answer.model_copy(update={"results": []}), "results", results))


@router.post(
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


@router.post(
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

"""The endpoints where rewards are posted (docs/reference/http.md). Invariant: as of routes.py."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Request, Response

from vllm_rollout.config import MAX_REMEMBERED_CANDIDATES, REWARD_THRESHOLD
from vllm_rollout.kernel.http.boundary import RolloutRoute
from vllm_rollout.kernel.http.clients import client_namespace, owned_name
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.errors import ERRORS, errors_of
from vllm_rollout.kernel.http.reward_door import Posted, RewardDoor, Taken
from vllm_rollout.kernel.http.serialised import PartsResponse, filled, to_json
from vllm_rollout.kernel.http.slices import each
from vllm_rollout.kernel.rules.rewards import NamedReward, RewardStatus
from vllm_rollout.parts.posted.body import (
    NamedRewardResult,
    NamedRewardsAnswer,
    NamedRewardsRequest,
    RewardCounts,
    RewardResult,
    RewardsAnswer,
    RewardsRequest,
)

router = APIRouter(route_class=RolloutRoute, tags=["learning"])
ROUTES = {15: router}


def _door(request: Request) -> RewardDoor:
    door: RewardDoor = request.app.state.rollout_service.rewards
    return door


async def post(door: RewardDoor, rollout_id: str, request: RewardsRequest, namespace: str) -> RewardsAnswer:
    """Post rewards of a rollout. `namespace`: of the client that owns it.

    Raises: RequestError, 404 for an unknown rollout, 409 for a filter that the rollout does not have.
    """
    name = owned_name(namespace, rollout_id)
    rewards = await each(request.rewards, lambda entry: NamedReward("rollout", name, entry.judged(request.threshold)))
    taken = await door.take(Posted(rewards, rollout_id, namespace, request.filter))
    if not taken.statuses:
        raise RequestError(
            f"no rollout {rollout_id!r} of yours is known here that was asked for with pruning. This server "
            f"remembers the newest rollouts with pruning, up to {MAX_REMEMBERED_CANDIDATES} candidates, until it "
            "ends. Take the id from the rollout's answer, and post rewards before the next restart.",
            status=HTTPStatus.NOT_FOUND,
            param="rollout_id",
        )
    statuses = _statuses(taken, len(rewards))
    pairs = zip(rewards, statuses, strict=True)
    door.on_accepted(rollout_id, [named.reward for named, status in pairs if status == "accepted"])
    results = await each(zip(request.rewards, statuses, strict=True), lambda pair: RewardResult.of(*pair))
    return RewardsAnswer(
        id=rollout_id,
        results=results,
        counts=RewardCounts.of(statuses),
        threshold=request.threshold,
        **{"num_training": 0, "head_version": 0, **taken.fields},
    )


async def post_named(door: RewardDoor, request: NamedRewardsRequest, client: str) -> NamedRewardsAnswer:
    """Post rewards for candidates of any requests and groups. Clients can only name their own."""
    namespace = request.namespace or ""
    rewards = await each(request.rewards, lambda entry: entry.named(request.threshold, client, namespace))
    taken = await door.take(Posted(rewards, namespace=client))
    statuses = _statuses(taken, len(rewards))
    results = await each(zip(request.rewards, statuses, strict=True), lambda pair: NamedRewardResult.of(*pair))
    return NamedRewardsAnswer(
        results=results,
        counts=RewardCounts.of(statuses),
        threshold=request.threshold,
        **{"num_training": 0, "head_versions": {}, **taken.fields},
    )


def _statuses(taken: Taken, num_rewards: int) -> list[RewardStatus]:
    return [taken.statuses.get(position, "unknown") for position in range(num_rewards)]


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
    answer = await post(_door(request), rollout_id, body, client_namespace())
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
    answer = await post_named(_door(request), body, client_namespace())
    return await _in_parts(answer)

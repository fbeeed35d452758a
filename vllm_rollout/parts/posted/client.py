"""Calls that post rewards."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel

from vllm_rollout.kernel.client.blocking import Blocked, blocking
from vllm_rollout.kernel.client.body import said
from vllm_rollout.kernel.client.calls import Call, typed
from vllm_rollout.kernel.client.methods import ClientPart, awaited
from vllm_rollout.kernel.client.sender import Sender
from vllm_rollout.parts.posted.body import NamedRewardEntry, NamedRewardsAnswer, RewardEntry, RewardsAnswer

RewardLike = tuple[str, int, float] | Mapping[str, Any] | RewardEntry
"""(prompt_id, index, reward), or an object with these fields."""

NamedRewardLike = tuple[str, int, float] | Mapping[str, Any] | NamedRewardEntry
"""(request_id, index, reward), or an object with these fields or with `group_id` in place of the first."""


def post_rewards(rollout_id: str, rewards: Iterable[RewardLike], threshold: float | None = None) -> Call[RewardsAnswer]:
    """Post rewards of a rollout's trajectories: (prompt_id, index, reward) each. Safe to repeat.

    `threshold`: a reward above it is positive. None: the server's default, 0.5.

    Raises: RolloutError, 404 for an unknown rollout. TypeError for a reward of unknown form. ValueError for a reward
    that is not finite.
    """
    entries = [_entry(reward, position, "prompt_id") for position, reward in enumerate(rewards)]
    body = said({"rewards": entries, "threshold": threshold})
    return Call("POST", f"/v1/rollouts/{quote(rollout_id, safe='')}/rewards", typed(RewardsAnswer), body)


def post_named_rewards(
    rewards: Iterable[NamedRewardLike], threshold: float | None = None, namespace: str | None = None
) -> Call[NamedRewardsAnswer]:
    """Post rewards of candidates of any groups: (request_id, index, reward) each, or {"group_id": …, "index": …,
    "reward": …}. The request id is the id of an OpenAI answer, the index that of its choice. Safe to repeat.

    `threshold`: a reward above it is positive. None: the server's default. `namespace`: the requests'
    rollout_namespace.

    Raises: RolloutError. TypeError for a reward of unknown form. ValueError for a reward that is not finite.
    """
    entries = [_entry(reward, position, "request_id") for position, reward in enumerate(rewards)]
    body = said({"rewards": entries, "threshold": threshold, "namespace": namespace})
    return Call("POST", "/v1/rewards", typed(NamedRewardsAnswer), body)


def _entry(reward: RewardLike | NamedRewardLike, position: int, name: str) -> dict[str, Any]:
    try:
        if isinstance(reward, BaseModel):
            entry = reward.model_dump(exclude_none=True)
        elif isinstance(reward, Mapping):
            entry = dict(reward)
        else:
            id, index, value = reward
            entry = {name: id, "index": index, "reward": value}
        # numpy and torch scalars are not JSON
        entry["reward"] = float(entry["reward"])
        if "index" in entry:
            entry["index"] = operator.index(entry["index"])
    except (TypeError, ValueError, KeyError) as error:
        raise TypeError(
            f"rewards[{position}] must be ({name}, index, reward) or a dict of these, got {reward!r:.80} ({error!r})"
        ) from error
    if not math.isfinite(entry["reward"]):
        raise ValueError(f"rewards[{position}].reward must be a finite number, got {entry['reward']}. Leave it out.")
    return entry


class AsyncPostedCalls(Sender):
    """Methods of the async client."""

    post_rewards = awaited(post_rewards)
    post_named_rewards = awaited(post_named_rewards)


class PostedCalls(Blocked):
    """Methods of the sync client."""

    post_rewards = blocking(AsyncPostedCalls.post_rewards)
    post_named_rewards = blocking(AsyncPostedCalls.post_named_rewards)


CLIENT = ClientPart(AsyncPostedCalls, PostedCalls)

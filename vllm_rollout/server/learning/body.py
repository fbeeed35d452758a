"""Bodies and answers of the endpoints that learn (docs/http.md)."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, Field, StrictFloat, StrictInt, StrictStr

from vllm_rollout.config import REWARD_THRESHOLD
from vllm_rollout.group.ledger import RewardStatus
from vllm_rollout.server.body import MAX_INT, Body
from vllm_rollout.server.engine import HeadInfo

MAX_REWARDS = 100_000
"""Rewards in one request."""

HEAD_HEADER = "quality-head"
"""Header of `GET /v1/quality_head`: a HeadAnswer beside the weights."""

ADMIN_HEADER = "x-rollout-admin-key"
"""Header of a PUT where the server was started with --rollout-admin-key."""

Filter = Literal["zero_variance"]
"""DAPO's dynamic sampling: a group whose rewards are all the same teaches nothing."""

PromptId = Annotated[StrictStr, Field(min_length=1, max_length=256)]


class RewardEntry(Body):
    """The reward of one trajectory."""

    prompt_id: PromptId = Field(description="As in the rollout's answer.")
    index: Annotated[StrictInt, Field(ge=0, le=MAX_INT)] = Field(description="Of the trajectory in its group, from 0.")
    reward: StrictFloat = Field(description="A finite number.")


class RewardsRequest(Body):
    """What the trajectories of a rollout were worth."""

    rewards: Annotated[list[RewardEntry], Field(min_length=1, max_length=MAX_REWARDS, fail_fast=True)] = Field(
        description=f"From 1 to {MAX_REWARDS} rewards. Pruned candidates need none."
    )
    filter: Filter | None = Field(
        default=None,
        description='"zero_variance", for the rollout of a round that filters: groups whose rewards are all the same '
        "leave it. Said again by the round; here it makes sure that it does.",
    )
    threshold: StrictFloat = Field(
        default=REWARD_THRESHOLD,
        description=f"A reward above it is positive, any other negative: a finite number. The default, "
        f"{REWARD_THRESHOLD}, is right for rewards of 0 and 1, of -1 and 1, and for scores in [0, 1].",
    )


EXPLANATIONS: dict[RewardStatus, str | None] = {
    "accepted": None,
    "duplicate": "the same reward was posted before; nothing changes",
    "conflict": "another reward was posted before, and stays",
    "unknown": "no such candidate in this rollout, or one that was forgotten; check prompt_id and index",
    "unfinished": "it is still running, or was stopped (pruned, surplus, failed): no reward is expected",
    "unscored": "it ended before detection_length: there is nothing to learn from",
}
assert EXPLANATIONS.keys() == set(get_args(RewardStatus))


class RewardResult(BaseModel):
    prompt_id: str
    index: int
    status: RewardStatus
    message: str | None = None
    """Why the reward was not accepted."""


class RewardCounts(BaseModel):
    accepted: int = 0
    duplicate: int = 0
    conflict: int = 0
    unknown: int = 0
    unfinished: int = 0
    unscored: int = 0


class RewardsAnswer(BaseModel):
    id: str
    object: Literal["rollout.rewards"] = "rollout.rewards"
    results: list[RewardResult]
    """One per posted reward, in their order."""
    counts: RewardCounts
    threshold: float
    num_training: int
    head_version: int
    filtered: list[str] = []
    """Prompt ids whose groups left the round by these rewards."""


class HeadAnswer(BaseModel):
    """What a quality head is for; also in the header of the GET."""

    object: Literal["quality_head"] = "quality_head"
    detection_length: int
    hidden_size: int
    version: int
    num_steps: int
    num_labels: int

    @classmethod
    def of(cls, head: HeadInfo) -> HeadAnswer:
        return cls.model_validate(head, from_attributes=True)

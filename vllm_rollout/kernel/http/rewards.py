"""Bodies and answers of the endpoints where rewards are posted (docs/reference/http.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, model_validator

from vllm_rollout.config import MAX_REWARD, REWARD_THRESHOLD
from vllm_rollout.kernel.http.body import MAX_INT, Body
from vllm_rollout.kernel.http.clients import owned_name
from vllm_rollout.kernel.rules.rewards import NamedReward, Reward, RewardStatus, request_name

MAX_REWARDS = 100_000
"""Most rewards in one request."""

Filter = Literal["zero_variance"]
"""DAPO's dynamic sampling: leave out groups whose rewards are all the same."""

MAX_NAME_CHARS = 512
"""Most characters of a request's id, part of which the client may have chosen."""

FINITE = f"A finite number, from -{MAX_REWARD:g} to {MAX_REWARD:g}."


def _bounded(reward: float) -> float:
    if abs(reward) > MAX_REWARD:
        raise ValueError(f"must be a finite number from -{MAX_REWARD:g} to {MAX_REWARD:g}, got {reward:g}")
    return reward


RewardValue = Annotated[StrictFloat, Field(allow_inf_nan=False), AfterValidator(_bounded)]

PromptId = Annotated[StrictStr, Field(min_length=1, max_length=256)]


class RewardEntry(Body):
    """The reward of one trajectory of a rollout."""

    prompt_id: PromptId = Field(description="The prompt's id, as in the rollout's answer.")
    index: Annotated[StrictInt, Field(ge=0, le=MAX_INT)] = Field(
        description="Index of the trajectory in its group, from 0."
    )
    reward: RewardValue = Field(description=FINITE)

    def labelled(self, threshold: float) -> Reward:
        return Reward(self.prompt_id, self.index, self.reward, positive=self.reward > threshold)


class RewardsRequest(Body):
    """Rewards for the trajectories of a rollout."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"rewards": [{"prompt_id": "q1", "index": 3, "reward": 1.0}]}]}
    )

    rewards: Annotated[list[RewardEntry], Field(min_length=1, max_length=MAX_REWARDS, fail_fast=True)] = Field(
        description=f"From 1 to {MAX_REWARDS} rewards. Pruned candidates need none."
    )
    filter: Filter | None = Field(
        default=None,
        description='"zero_variance": groups whose rewards are all the same leave the rollout. It is for the rollout '
        "of a round that filters, and makes sure that the round does.",
    )
    threshold: StrictFloat = Field(
        default=REWARD_THRESHOLD,
        description="A reward above this value is positive, any other negative: a finite number. The default, "
        f"{REWARD_THRESHOLD}, is right for rewards of 0 and 1, of -1 and 1, and for scores in [0, 1].",
    )


class NamedRewardEntry(Body):
    """The reward of one candidate, named by exactly one of `request_id` and `group_id`, and by its index."""

    request_id: Annotated[StrictStr, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = Field(
        default=None, description="The `id` of an OpenAI answer. index is then the index of its choice."
    )
    group_id: Annotated[StrictStr, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = Field(
        default=None, description="The `group_id` in a rollout's answer. index is then the index of its trajectory."
    )
    index: Annotated[StrictInt, Field(ge=0, le=MAX_INT)] = Field(
        default=0, description="Index of the choice or the trajectory, from 0."
    )
    reward: RewardValue = Field(description=FINITE)

    @model_validator(mode="after")
    def _has_one_id(self) -> NamedRewardEntry:
        if (self.request_id is None) == (self.group_id is None):
            raise ValueError("needs either request_id (of an OpenAI answer) or group_id (of a rollout's answer)")
        return self

    def named(self, threshold: float, client: str, namespace: str) -> NamedReward:
        """`client`: the client's namespace of requests and groups. `namespace`: the rollout_namespace of its
        requests."""
        reward = Reward("", self.index, self.reward, positive=self.reward > threshold)
        if self.group_id is not None:
            return NamedReward("group", owned_name(client, self.group_id), reward)
        assert self.request_id is not None  # it has one of the two
        return NamedReward("request", request_name(client, self.request_id, namespace), reward)


class NamedRewardsRequest(Body):
    """Rewards for candidates of any requests and groups."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "rewards": [
                        {"request_id": "chatcmpl-8d5f", "index": 2, "reward": 1.0},
                        {"group_id": "rollout-8d5f-0", "index": 3, "reward": 0.0},
                    ],
                    "namespace": "run-7",
                }
            ]
        }
    )

    rewards: Annotated[list[NamedRewardEntry], Field(min_length=1, max_length=MAX_REWARDS, fail_fast=True)] = Field(
        description=f"From 1 to {MAX_REWARDS} rewards. Pruned candidates need none."
    )
    threshold: StrictFloat = Field(
        default=REWARD_THRESHOLD,
        description="A reward above this value is positive, any other negative, as for the rewards of a rollout.",
    )
    namespace: PromptId | None = Field(
        default=None, description="The rollout_namespace of these requests. group_ids have no namespace."
    )


EXPLANATIONS: dict[RewardStatus, str | None] = {
    "accepted": None,
    "duplicate": "the same reward was posted before; nothing changes",
    "conflict": "another reward was posted before, and stays",
    "unknown": "no such candidate in this rollout, or one that was forgotten; check prompt_id and index",
    "unfinished": "it is still running, or was stopped (pruned, surplus, failed): no reward is expected",
    "unscored": "it ended before detection_length, or passed it in an earlier round: only its prompt's success counts",
}
UNKNOWN_NAME = (
    "no candidate is known by that name: its request had no rollout_detection_length, another rollout_namespace than "
    "this body's namespace, was another client's (another API key), or was forgotten; take id and index from the "
    "answer, and post rewards before the next restart"
)
assert EXPLANATIONS.keys() == set(get_args(RewardStatus))


class RewardResult(BaseModel):
    """The outcome of one posted reward."""

    prompt_id: str
    index: int
    status: RewardStatus
    """`accepted`: it is learned. `duplicate`: the same reward came before. `conflict`: another reward came before, and
    stays. `unknown`: no such candidate is remembered. `unfinished`: the candidate runs, or was stopped. `unscored`: it
    ended before `detection_length`, or passed it in an earlier round. Only the success of its prompt counts it."""
    message: str | None = None
    """Reason why the reward was not accepted. Null for an accepted one."""

    @classmethod
    def of(cls, entry: RewardEntry, status: RewardStatus) -> RewardResult:
        return cls(prompt_id=entry.prompt_id, index=entry.index, status=status, message=EXPLANATIONS[status])


class RewardCounts(BaseModel):
    accepted: int = 0
    duplicate: int = 0
    conflict: int = 0
    unknown: int = 0
    unfinished: int = 0
    unscored: int = 0

    @classmethod
    def of(cls, statuses: Iterable[RewardStatus]) -> RewardCounts:
        return cls(**Counter[str](statuses))


class RewardsAnswer(BaseModel):
    id: str
    object: Literal["rollout.rewards"] = "rollout.rewards"
    results: list[RewardResult]
    """One result per posted reward, in their order."""
    counts: RewardCounts
    threshold: float
    num_training: int
    """Accepted rewards by which the head is trained, too; hidden states of the others are no longer there."""
    head_version: int
    """Version before that training."""
    filtered: list[str] = []
    """Ids of prompts whose groups left the round because of these rewards."""


class NamedRewardResult(BaseModel):
    request_id: str | None = None
    group_id: str | None = None
    index: int
    status: RewardStatus
    message: str | None = None
    """Reason why the reward was not accepted. Null for an accepted one."""

    @classmethod
    def of(cls, entry: NamedRewardEntry, status: RewardStatus) -> NamedRewardResult:
        return cls(
            request_id=entry.request_id,
            group_id=entry.group_id,
            index=entry.index,
            status=status,
            message=UNKNOWN_NAME if status == "unknown" else EXPLANATIONS[status],
        )


class NamedRewardsAnswer(BaseModel):
    object: Literal["rewards"] = "rewards"
    results: list[NamedRewardResult]
    """One result per posted reward, in their order."""
    counts: RewardCounts
    threshold: float
    num_training: int
    head_versions: dict[int, int]
    """Version of the base model's head before this training, by detection length of the known groups."""
    adapter_head_versions: dict[str, dict[int, int]] = {}
    """Versions as in `head_versions` for each LoRA adapter, by its name."""

"""Request fields about the reward of trajectories (docs/guides/rewards.md)."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Discriminator, Field, StrictFloat, StrictStr, Tag

from vllm_rollout.config import MAX_REWARD_S, REWARD_THRESHOLD
from vllm_rollout.kernel.http.body import Body
from vllm_rollout.kernel.rules.rewards import Estimator

RewardName = Annotated[StrictStr, Field(min_length=1, max_length=256)]


class RewardOptions(Body):
    """A reward by name, and how it is used."""

    name: RewardName = Field(
        description="Name of a built-in reward (exact, regex, math), or of a --rollout-reward of the server."
    )
    timeout_s: Annotated[StrictFloat, Field(gt=0, le=MAX_REWARD_S)] | None = Field(
        default=None,
        description="Upper bound, in seconds, of the time to grade a trajectory, with reward code of the time for "
        "each test. It holds even if the server has learned that more time is needed. Default: the server's limits.",
    )
    estimator: Estimator = Field(
        default="grpo", description="Estimator of the advantages in the answer: grpo, rloo or mean."
    )
    threshold: StrictFloat = Field(
        default=REWARD_THRESHOLD, description="A reward above this value is positive for what the server learns."
    )


RewardField = Annotated[
    Annotated[RewardName, Tag("<name>")] | Annotated[RewardOptions, Tag("<object>")],
    Discriminator(lambda value: "<object>" if isinstance(value, dict | BaseModel) else "<name>"),
]
"""A reward by name or by options. A name alone means the default options."""


def options_of(reward: str | RewardOptions) -> RewardOptions:
    return RewardOptions(name=reward) if isinstance(reward, str) else reward

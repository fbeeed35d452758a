"""Statistics of a group's rewards: mean, spread, whether they give a gradient, and the advantage of each trajectory.

Invariant: only trajectories with a reward count. A trajectory without one (void, or a grader error) has no advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from vllm_rollout.kernel.rules.rewards import Estimator, summarize

ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
SMALLEST_STD = 1e-6
"""Added to a standard deviation before a division by it."""


def advantages(rewards: Sequence[float | None], estimator: Estimator = "grpo") -> list[float | None]:
    """Advantage of each trajectory, in order. All 0 if the rewards do not differ. None without a reward.

    Raises: ValueError for an unknown estimator.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")
    said = summarize(rewards)
    if said.mean is None or not said.teaches or said.std is None:
        return [None if reward is None else 0.0 for reward in rewards]
    scale = {
        "grpo": 1 / (said.std + SMALLEST_STD),
        "rloo": said.num_rewards / (said.num_rewards - 1),
        "mean": 1.0,
    }[estimator]
    return [None if reward is None else (reward - said.mean) * scale for reward in rewards]

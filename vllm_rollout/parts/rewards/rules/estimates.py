"""Statistics of a group's rewards: mean, spread, whether they give a gradient, and the advantage of each trajectory.

Invariant: only trajectories with a reward count. A trajectory without one (void, or a grader error) has no advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple, get_args

from vllm_rollout.kernel.rules.rewards import Estimator

ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
SMALLEST_STD = 1e-6
"""Added to a standard deviation before a division by it."""


class RewardSummary(NamedTuple):
    """Statistics of a group's rewards. Only trajectories with a reward count."""

    num_rewards: int
    mean: float | None
    """None without a reward."""
    std: float | None
    """Standard deviation of the sample (n - 1). None with fewer than two rewards."""
    teaches: bool
    """True if the rewards differ. Otherwise no estimator has a gradient for the group (DAPO, dynamic sampling)."""


def summarize(rewards: Sequence[float | None]) -> RewardSummary:
    known = [reward for reward in rewards if reward is not None]
    return RewardSummary(
        len(known),
        fmean(known) if known else None,
        stdev(known) if len(known) > 1 else None,
        teaches=len(set(known)) > 1,
    )


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

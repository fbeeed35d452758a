"""Weight, in GRPO's gradient, of a group that ends when its rewards differ.

Rewards are 0 or 1 and candidates independent. For a zero-sum advantage A, E[sum A_i s_i] = w(p) grad p with
w(p) = E[sum A_i r_i] / (p (1 - p)), s_i a candidate's score function. Any rule that looks at rewards in the order of
launch changes w and nothing else. `weights` enumerates w over the ends of a group.

Invariant: the same numbers for the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from vllm_rollout.group.rewards.estimates import Estimator
from vllm_rollout.group.rewards.until import group_weight

LEAST_CHANCE = 1e-12
"""Ends of an unlimited group that are rarer than this are left out."""


class End(NamedTuple):
    """One of the ways in which a group ends, with its probability."""

    chance: float
    num_graded: int
    num_right: int


def ends(rate: float, group_size: int, most: int | None) -> Iterator[End]:
    """All ends of a group of 0 and 1 at this success rate. most: `max_candidates`, or None for no limit."""
    wrong = 1 - rate
    for right in range(1, group_size):
        yield End(math.comb(group_size, right) * rate**right * wrong ** (group_size - right), group_size, right)
    num = group_size
    while most is None or num < most:
        num += 1
        rare = rate * wrong ** (num - 1), wrong * rate ** (num - 1)
        if most is None and max(rare) < LEAST_CHANCE:
            return
        yield End(rare[0], num, 1)
        yield End(rare[1], num, num - 1)
    yield End(wrong**most, most, 0)
    yield End(rate**most, most, most)


def signal(estimator: Estimator, num: int, right: int) -> float:
    """sum A_i r_i of a group with `right` rewards of 1, by the closed form of `group/rewards/estimates.py`."""
    squares = right * (num - right) / num
    if not squares:
        return 0.0
    return squares * {"mean": 1.0, "rloo": num / (num - 1), "grpo": math.sqrt((num - 1) / squares)}[estimator]


def right_returned(end: End, group_size: int) -> int:
    """Rewards of 1 among the first `group_size - 1` and the one that differs, else among the first `group_size`."""
    if end.num_graded == group_size:
        return end.num_right
    return {0: 0, 1: 1, end.num_graded: group_size}.get(end.num_right, group_size - 1)


def weights(rate: float, group_size: int, most: int | None, estimator: Estimator) -> dict[str, float]:
    """w(p) of a prompt over plain GRPO's, by which answers are returned, and estimates of p by the returned rewards."""

    def expected(value: Callable[[End], float], most: int | None = most) -> float:
        return sum(end.chance * value(end) for end in ends(rate, group_size, most))

    def returned(end: End) -> float:
        return signal(estimator, group_size, right_returned(end, group_size))

    def teaches(end: End) -> float:
        return float(0 < end.num_right < end.num_graded)

    def weighed(end: End) -> float:
        return group_weight(group_size, end.num_graded) * returned(end)

    def of_all(end: End) -> float:
        return group_size / end.num_graded * signal(estimator, end.num_graded, end.num_right)

    plain, plain_teaches = expected(returned, group_size), expected(teaches, group_size)
    ours, ours_teaches = expected(returned), expected(teaches)
    return {
        "plain": plain / (rate * (1 - rate)),
        "ours": ours / plain,
        "ours_weighed": expected(weighed) / plain,
        "all_graded": expected(of_all) / plain,
        "filtered": 1 / plain_teaches,
        "ours_over_filtered_if_it_teaches": (ours / ours_teaches) / (plain / plain_teaches),
        "teaches": ours_teaches,
        "num_graded": expected(lambda end: end.num_graded),
        "bias_of_returned": expected(lambda end: right_returned(end, group_size) / group_size) - rate,
        "bias_of_all": expected(lambda end: end.num_right / end.num_graded) - rate,
    }

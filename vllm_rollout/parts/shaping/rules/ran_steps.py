"""Estimates step times of a rollout from the end times and tokens of its candidates.

Invariant: the order of groups and of their candidates has no effect.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

SEEN_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the tokens of a group's longest candidate between which its step times are measured."""
LATE_GROUPS = 1 / 3
"""Share of the groups, those that end last, from which the step time of the tail is computed."""


class RanCandidates(NamedTuple):
    """The candidates of one group. Seconds count from the beginning of its rollout."""

    started_s: float
    ended_s: Sequence[float]
    tokens: Sequence[int]
    """Output tokens that each candidate generated in the rollout."""

    @property
    def ends(self) -> list[tuple[float, int]]:
        """(end time in seconds, tokens) of candidates with tokens, ascending."""
        return sorted((at, num) for at, num in zip(self.ended_s, self.tokens, strict=True) if num)


class StepCost(NamedTuple):
    """Seconds of a step: a fixed part, and a part for each candidate in it."""

    own_s: float
    candidate_s: float


class Running:
    """Number of running candidates over time."""

    def __init__(self, groups: Sequence[RanCandidates]) -> None:
        changes = sorted(
            (at, change) for its in groups for end in its.ended_s for at, change in ((its.started_s, 1), (end, -1))
        )
        self._moments = [at for at, _ in changes]
        self._counts = list(accumulate(change for _, change in changes))
        spans = (num * (to - at) for num, (at, to) in zip(self._counts, pairwise(self._moments), strict=False))
        self._ran_s = list(accumulate(spans, initial=0.0))

    @property
    def most(self) -> int:
        return max(self._counts, default=0)

    @property
    def ran_s(self) -> float:
        """Sum of candidates times seconds."""
        return self._ran_s[-1]

    def mean(self, from_s: float, to_s: float) -> float:
        return (self._until(to_s) - self._until(from_s)) / (to_s - from_s)

    def _until(self, seconds: float) -> float:
        place = bisect_right(self._moments, seconds) - 1
        return self._ran_s[place] + self._counts[place] * (seconds - self._moments[place])


def bubble(groups: Sequence[RanCandidates], seconds: float) -> float:
    """Share of places x time that stood empty. There is a place for each candidate of the largest number that ran at
    once."""
    running = Running(groups)
    places = running.most
    return min(max(1 - running.ran_s / (places * seconds), 0.0), 1.0) if places else 0.0


def tail_step_s(groups: Sequence[RanCandidates]) -> float | None:
    """Seconds per token over the second half of the longest candidate's tokens, in the groups that ended last. None
    if no group has candidates of different lengths."""
    slopes: list[tuple[float, float, int]] = []
    for group in groups:
        if not (ends := group.ends):
            continue
        last_s, most = ends[-1]
        at, num = next((at, num) for at, num in ends if 2 * num >= most)
        slopes.append((last_s, last_s - at, most - num))
    slopes.sort(reverse=True)
    late = slopes[: max(1, math.ceil(LATE_GROUPS * len(slopes)))]
    late = late if any(num > 0 for *_, num in late) else slopes
    num_tokens = sum(max(num, 0) for *_, num in late)
    return math.fsum(took_s for _, took_s, num in late if num > 0) / num_tokens if num_tokens else None


class _Seen(NamedTuple):
    """A period in which a candidate went on."""

    num_tokens: int
    step_s: float
    num_running: float


def step_cost(groups: Sequence[RanCandidates], tail_s: float) -> StepCost:
    """Fit a line to step times over the number of running candidates.

    If more candidates do not lengthen steps in this rollout, each step takes the time of a tail step.
    """
    running = Running(groups)
    seen = []
    for ends in filter(None, (group.ends for group in groups)):
        reached = [next(end for end in ends if end[1] >= share * ends[-1][1]) for share in SEEN_SHARES]
        for (from_s, before), (to_s, after) in pairwise(reached):
            if after > before and to_s > from_s:
                num = after - before
                seen.append(_Seen(num, (to_s - from_s) / num, running.mean(from_s, to_s)))
    weight = sum(each.num_tokens for each in seen)
    if not weight:
        return StepCost(tail_s, 0.0)
    mean_s = math.fsum(each.num_tokens * each.step_s for each in seen) / weight
    mean_running = math.fsum(each.num_tokens * each.num_running for each in seen) / weight
    squares = math.fsum(each.num_tokens * (each.num_running - mean_running) ** 2 for each in seen)
    product = math.fsum(each.num_tokens * (each.num_running - mean_running) * (each.step_s - mean_s) for each in seen)
    if squares <= 0 or product <= 0:
        return StepCost(tail_s, 0.0)
    candidate_s = min(product / squares, mean_s / mean_running)
    return StepCost(mean_s - candidate_s * mean_running, candidate_s)

"""Survival curve of candidates over normalized length, from counts of ends and of candidates at risk.

Ends over risks is the rate at which candidates end in a bin. The share that survives all bins so far is the estimate of
Kaplan and Meier, for lengths that are known to a bin. A censored length is at risk up to its stop and has no end.

Beyond the last bin with enough candidates at risk, the curve goes on as a log-normal one. Its slope is that of the
upper half of the known curve, but never flatter than a log-normal fitted to the whole known curve. Its standard
deviation is at most `MAX_TAIL_STD`, and it ends with the last bin.

Invariant: rates are finite and positive, whatever the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from statistics import NormalDist
from typing import NamedTuple

from vllm_rollout.parts.shaping.rules.censoring import log_survival

STEP = 0.125
"""Width of a bin of log lengths: lengths of adjacent bins differ by 13 %."""
LEFT, RIGHT = -48, 48
"""First bin, and the bin after the last: from 1/400 to 400 times a usual length of the prompt."""
NUM_BINS = RIGHT - LEFT

PRIOR_LOG_STD = 0.7
"""Prior standard deviation of log lengths within a prompt, where std is 0.8 times the mean. A larger measured value
replaces it.

A smaller one does not: if few candidates were seen, later endings correct a curve that is too wide. A curve that is too
narrow would end unknown candidates too early.
"""
PRIOR_RISK = 1.0
"""Weight of the log-normal curve in each bin, in candidates at risk. With four, it would outweigh the few candidates
that reach a far second mode."""
MIN_RISK = 4.0
"""Fewest candidates at risk with which a bin counts as seen."""
MIN_ENDS = 4.0
"""Fewest ends from which a slope is computed."""
MIN_TAIL_STD, MAX_TAIL_STD = 0.05, 1.5
"""Bounds of the log standard deviation beyond the bins that were seen. At 1.5, std is 2.9 times the mean."""
MIN_RATE, MAX_RATE = 1e-6, 5.0
"""Bounds of the rate at which candidates end within a bin. Beyond 5, less than 1 % reach the next bin, even if few
were seen."""

NORMAL = NormalDist()
SCALES = [math.exp((bin_ + 0.5) * STEP) for bin_ in range(LEFT, RIGHT)]


class BinnedGroup(NamedTuple):
    """One group by bins of log length."""

    first: int
    """Bin of the first item of `ends` and `risks`."""
    ends: list[float]
    """Candidates that ended by themselves, by bin."""
    risks: list[float]
    """Candidates that ran, by bin, as shares of its width."""
    num: int
    """Number of candidates."""
    num_ends: int


def binned(finished: Iterable[tuple[float, int]], stops: Iterable[tuple[float, int]]) -> BinnedGroup:
    """Bin a group of at least one candidate. Takes (log length, number of candidates).

    If a group spans more bins than a table has, the long lengths keep their bins, and the others move up.
    """
    cells = [(x / STEP, count, count) for x, count in finished] + [(x / STEP, count, 0) for x, count in stops]
    last = math.floor(max(x for x, *_ in cells))
    first = max(math.floor(min(x for x, *_ in cells)), last - NUM_BINS + 1)
    ends, risks, leaving = ([0.0] * (last - first + 1) for _ in range(3))
    for x, count, ended in cells:
        bin_ = max(math.floor(x), first)
        ends[bin_ - first] += ended
        risks[bin_ - first] += count * max(x - bin_, 0.0)
        leaving[bin_ - first] += count
    num = sum(count for _, count, _ in cells)
    alive = float(num)
    for i, num_leaving in enumerate(leaving):
        alive -= num_leaving
        risks[i] += alive
    return BinnedGroup(first, ends, risks, num, sum(ended for *_, ended in cells))


class SurvivalCurve:
    """Rates at which candidates end, by bin, and the survival that follows."""

    def __init__(self, ends: Sequence[float], risks: Sequence[float], log_std: float = PRIOR_LOG_STD) -> None:
        """log_std: measured standard deviation of log lengths within prompts."""
        prior_std = max(log_std, PRIOR_LOG_STD)
        rates = _blended(ends, risks, _normal_rates(0.0, prior_std))
        self.edge = max((i + 1 for i, risk in enumerate(risks) if risk >= MIN_RISK), default=0)
        """Number of bins up to the last one that was seen."""
        self.tail_std = prior_std
        """Standard deviation of log lengths beyond `edge`."""
        points = _quantiles(rates[: self.edge], ends)
        upper = [point for point in points if point.below >= points[-1].below / 2]
        slopes = [std for std in (_std(upper), _std(points)) if std is not None]
        if slopes:
            self.tail_std = min(max(min(slopes), MIN_TAIL_STD), MAX_TAIL_STD)
            here = points[-1]
            tail = _normal_rates(here.position - self.tail_std * here.quantile, self.tail_std)
            rates[self.edge :] = _blended(ends, risks, tail)[self.edge :]
        self._follow(rates)

    @classmethod
    def near_log_normal(
        cls, ends: Sequence[float], risks: Sequence[float], log_std: float, prior_risk: float
    ) -> SurvivalCurve:
        """A log-normal curve of this standard deviation, with a weight of `prior_risk` candidates at risk in each bin.

        For few groups, all cut at similar lengths, it is steadier than a slope fitted to them.
        """
        curve = cls.__new__(cls)
        curve.edge, curve.tail_std = 0, log_std
        curve._follow(_blended(ends, risks, _normal_rates(0.0, log_std), prior_risk))
        return curve

    def _follow(self, rates: Sequence[float]) -> None:
        self.rates = [min(max(rate, MIN_RATE), MAX_RATE) for rate in rates]
        self.logs = [math.log(rate) for rate in self.rates]
        self.hazards = list(accumulate(self.rates, initial=0.0))
        self.survival = [math.exp(-hazard) for hazard in self.hazards[:-1]] + [0.0]
        """Share that reaches each bin. Candidates that reach the last bin end there."""
        self._beyond = self._moments_from_each_bin()

    def reach(self, position: float) -> tuple[int, float, float]:
        """The bin of a position (in bins from the first), the part of the bin before it, and the share that reaches
        it."""
        bin_ = min(max(math.floor(position), 0), NUM_BINS - 1)
        part = min(max(position - bin_, 0.0), 1.0)
        return bin_, part, self.survival[bin_] * math.exp(-self.rates[bin_] * part)

    def beyond(self, position: float) -> tuple[float, float]:
        """First and second moment of e ** w, given that w is beyond the position."""
        bin_, part, reach = self.reach(position)
        here = max(reach - self.survival[bin_ + 1], 0.0) / reach
        scale = math.exp((bin_ + LEFT + (part + 1) / 2) * STEP)
        first, second = self._beyond[bin_ + 1]
        return here * scale + first / reach, here * scale**2 + second / reach

    def _moments_from_each_bin(self) -> list[tuple[float, float]]:
        """First and second moment over all candidates that end in a bin or later, not divided by their share."""
        first = second = 0.0
        moments = [(0.0, 0.0)]
        for bin_ in reversed(range(NUM_BINS)):
            share = self.survival[bin_] - self.survival[bin_ + 1]
            first, second = first + share * SCALES[bin_], second + share * SCALES[bin_] ** 2
            moments.append((first, second))
        return moments[::-1]


class _Quantile(NamedTuple):
    position: float
    quantile: float
    """The quantile of a standard normal variable at the same share."""
    below: float
    weight: float


def _quantiles(rates: Sequence[float], ends: Sequence[float]) -> list[_Quantile]:
    """The curve at the right edges of the bins in which candidates ended."""
    points = []
    for i, hazard in enumerate(accumulate(rates)):
        below = -math.expm1(-hazard)
        if ends[i] > 0 and 1e-9 < below < 1 - 1e-9:
            points.append(_Quantile((LEFT + i + 1) * STEP, NORMAL.inv_cdf(below), below, ends[i]))
    return points


def _std(points: Sequence[_Quantile]) -> float | None:
    """Standard deviation of the normal distribution with these quantiles, by weighted least squares. None if they
    are too few."""
    total = math.fsum(point.weight for point in points)
    if len(points) < 2 or total < MIN_ENDS:
        return None
    position = math.fsum(point.weight * point.position for point in points) / total
    quantile = math.fsum(point.weight * point.quantile for point in points) / total
    square = math.fsum(point.weight * (point.position - position) ** 2 for point in points)
    product = math.fsum(point.weight * (point.position - position) * (point.quantile - quantile) for point in points)
    return square / product if product > 1e-9 * total else None


def _blended(
    ends: Sequence[float], risks: Sequence[float], rates: Sequence[float], prior: float = PRIOR_RISK
) -> list[float]:
    return [(end + prior * rate) / (risk + prior) for end, risk, rate in zip(ends, risks, rates, strict=True)]


def _normal_rates(location: float, std: float) -> list[float]:
    logs = [log_survival(((LEFT + i) * STEP - location) / std) for i in range(NUM_BINS + 1)]
    return [min(before - after, MAX_RATE) for before, after in pairwise(logs)]

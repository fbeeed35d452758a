"""Mean and variance of the lengths of one group, some of them censored.

Candidates that were stopped (surplus, pruned, cut at `max_tokens`) are right-censored: the real length is larger. If
stops counted as lengths, the tail would be hidden. With 8 of 16 stopped when the 8th has finished, the standard
deviation would be a third to a tenth of the real one. So a log-normal distribution is fitted to the group. A censored
length counts with its mean and its variance, given that it is longer than its stop. A group without censored lengths
gives exactly its sample moments.

The fit is exact for log-normal lengths only. Therefore the expected lengths of cut candidates come from the form of the
data set (`parts/shaping/rules/shape.py`). The fit supplies how much more one group varies than others.

Limits: the fewer candidates finished, the larger is the error of the standard deviation. It tends to be too large if a
cap cut them. If none finished, only a lower bound is known. Pruning stops by score, not by chance, and a relation
between scores and lengths is ignored.

Invariant: moments are finite and not negative, and no censored length counts for less than its stop. If stops are very
many, that is the stop of a neighbour.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import NormalDist, fmean, variance
from typing import NamedTuple

LOG_STD_PRIOR_WEIGHT = 4.0
"""Observations that the data set's log standard deviation counts for in the fit of a group with censored lengths.

With fewer the standard deviation of cut groups is too noisy. With more, differences between prompts are lost.
"""


MIN_LOG_STD = 0.01
"""Lower bound of a fitted log standard deviation: lengths that differ by 1 %."""
MAX_LOG_STD = 1.5
"""Upper bound of a fitted log standard deviation, where std is 2.9 times the mean. Moments of cut lengths grow with
the exponential of its square."""

EM_TOLERANCE = 1e-4
"""Largest change of location and std of log lengths at which a fit ends. A group determines both to some 0.1."""
MAX_EM_STEPS = 200
MAX_STOPS = 128
"""Most different stops in a fit, which bounds its time. If there are more, each part of the sorted stops counts as
its middle one. With the largest one instead, the mean would be 3 % too long."""
FAR = 20.0
"""Standard deviations from which on the normal tail is replaced by its asymptote."""
MAX_LOG_TOKENS = 700.0
"""Upper bound of log lengths, so that their exponential is finite."""
NORMAL = NormalDist()


class GroupMoments(NamedTuple):
    """Statistics of one group's lengths, in tokens."""

    mean: float
    variance: float | None
    """Sample variance. None with fewer than two lengths."""
    spread: float
    """Mean squared distance to the mean: the group's share in the data set's variance."""
    log_squares: float
    """Sum of squared distances of log lengths to their location. 0 when fewer than two finished."""
    log_freedom: int
    """Degrees of freedom of `log_squares`."""


class LogLengthFit(NamedTuple):
    """A normal distribution of log lengths."""

    location: float
    std: float
    squares: float
    """Expected sum of squared distances to the location."""


def group_moments(finished: Sequence[int], stops: Sequence[int], prior_std: float) -> GroupMoments:
    """Moments of one group's lengths. With stops they are expectations under the fit.

    finished: lengths of candidates that ended by themselves. stops: tokens at which the others were cut. prior_std:
    standard deviation of log lengths within groups, over the data set.
    """
    num = len(finished) + len(stops)
    if stops:
        fit = fit_log_lengths(finished, stops, prior_std)
        tails = [(count, *moments_beyond(fit, stop)) for stop, count in counted_stops(stops)]
        mean = math.fsum([*finished, *(count * expected for count, expected, _ in tails)]) / num
        squares = math.fsum((length - mean) ** 2 for length in finished)
        squares += math.fsum(count * (expected - mean) ** 2 for count, expected, _ in tails)
        residual = math.fsum(count * unknown for count, _, unknown in tails)
        # the mean moves with the unknown lengths, which takes 1 / num of their variance out of the sample's
        sample_variance = (squares + (1 - 1 / num) * residual) / (num - 1) if num > 1 else None
        spread = (squares + residual) / num
        log_squares = fit.squares
    else:
        mean = fmean(finished)
        sample_variance = float(variance(finished)) if num > 1 else None
        spread = sample_variance * (num - 1) / num if sample_variance is not None else 0.0
        log_squares = _squares([log_length(length) for length in finished])
    if len(finished) < 2:
        return GroupMoments(mean, sample_variance, spread, 0.0, 0)
    return GroupMoments(mean, sample_variance, spread, log_squares, num - 1)


def fit_log_lengths(finished: Sequence[int], stops: Sequence[int], prior_std: float) -> LogLengthFit:
    """Fit a normal distribution to log lengths: maximum likelihood by expectation maximisation.

    The variance is that of the log lengths and of `LOG_STD_PRIOR_WEIGHT` more with the prior's, within [`MIN_LOG_STD`,
    `MAX_LOG_STD`]. If none finished, the likelihood has no maximum. The prior's std is then kept, and the location is
    the one with an even chance that all lengths exceed their stops.
    """
    cut = [(log_length(stop), count) for stop, count in counted_stops(stops)]
    std = bounded_log_std(prior_std)
    if not finished:
        return LogLengthFit(_even_chance(cut, std), std, 0.0)
    logs = [log_length(length) for length in finished]
    num = len(finished) + len(stops)
    center, own_squares = fmean(logs), _squares(logs)
    prior_squares = LOG_STD_PRIOR_WEIGHT * std**2
    location = math.fsum([*logs, *(count * log for log, count in cut)]) / num
    squares = own_squares
    for _ in range(MAX_EM_STEPS):
        tails = [(count, *_normal_tail(location, std, log)) for log, count in cut]
        before = location, std
        location = (len(logs) * center + math.fsum(count * expected for count, expected, _ in tails)) / num
        squares = own_squares + len(logs) * (center - location) ** 2
        squares += math.fsum(count * ((expected - location) ** 2 + unknown) for count, expected, unknown in tails)
        std = bounded_log_std(math.sqrt((squares + prior_squares) / (num + LOG_STD_PRIOR_WEIGHT)))
        if max(abs(location - before[0]), abs(std - before[1])) < EM_TOLERANCE:
            break
    return LogLengthFit(location, std, squares)


def length_beyond(fit: LogLengthFit, num_tokens: int, share: float) -> float:
    """The length that a share of `share`, in (0, 1), of all lengths above `num_tokens` exceeds."""
    if num_tokens <= 0:
        z = -NORMAL.inv_cdf(share)
    else:
        z = (math.log(num_tokens) - fit.location) / fit.std
        if z < FAR:
            z = -NORMAL.inv_cdf(share * 0.5 * math.erfc(z / math.sqrt(2)))
        else:
            z -= math.log(share) / z
    return math.exp(min(fit.location + fit.std * z, MAX_LOG_TOKENS))


def counted_stops(stops: Sequence[int]) -> list[tuple[int, int]]:
    """Stops with their counts. If they are many, `MAX_STOPS` of them, evenly spaced in their order."""
    counts = Counter(stops)
    if len(counts) <= MAX_STOPS:
        return list(counts.items())
    ordered = sorted(stops)
    ends = [len(ordered) * part // MAX_STOPS for part in range(MAX_STOPS + 1)]
    return [(ordered[(start + end) // 2], end - start) for start, end in pairwise(ends)]


def bounded_log_std(std: float) -> float:
    return min(max(std, MIN_LOG_STD), MAX_LOG_STD)


def moments_beyond(fit: LogLengthFit, stop: int) -> tuple[float, float]:
    """Mean and variance of a length, in tokens, given that it is longer than `stop`."""
    location, std, _ = fit
    distance = (log_length(stop) - location) / std
    beyond = log_survival(distance)
    first = math.exp(location + std**2 / 2 + log_survival(distance - std) - beyond)
    second = math.exp(2 * location + 2 * std**2 + log_survival(distance - 2 * std) - beyond)
    return max(first, float(stop)), max(second - first**2, 0.0)


def _normal_tail(location: float, std: float, stop: float) -> tuple[float, float]:
    """Mean and variance of a normal variable, given that it is larger than `stop`."""
    distance = (stop - location) / std
    hazard = math.exp(-(distance**2) / 2 - log_survival(distance)) / math.sqrt(2 * math.pi)
    return location + std * hazard, max(std**2 * (1 + distance * hazard - hazard**2), 0.0)


def log_survival(x: float) -> float:
    """Log of the probability that a standard normal variable is larger than x."""
    if x < 35:
        return math.log(0.5 * math.erfc(x / math.sqrt(2)))
    # erfc soon underflows, and the asymptotic series is exact to 1e-8 from here on
    return -(x**2) / 2 - math.log(x * math.sqrt(2 * math.pi)) + math.log1p(-1 / x**2 + 3 / x**4)


def _even_chance(cut: Sequence[tuple[float, int]], std: float) -> float:
    """Location with probability 1/2 that all lengths exceed their stops. `cut`: (log of a stop, count)."""
    low = min(stop for stop, _ in cut)
    high = max(stop for stop, _ in cut) + 10 * std
    for _ in range(50):
        middle = (low + high) / 2
        if math.fsum(count * log_survival((stop - middle) / std) for stop, count in cut) < -math.log(2):
            low = middle
        else:
            high = middle
    return high


def log_length(num_tokens: int) -> float:
    """Log of a length. A length of 0 tokens counts as half a token."""
    return math.log(max(num_tokens, 0.5))


def _squares(values: Sequence[float]) -> float:
    """Sum of squared distances to the mean."""
    center = fmean(values)
    return math.fsum((value - center) ** 2 for value in values)

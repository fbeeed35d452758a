"""Probabilities by their odds, and logistic regression of successes on one number.

Invariant: values in (0, 1) stay there. The same counts give the same curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import NamedTuple

SLOPE_PRECISION = 0.25
"""Precision of the slope's normal prior around 0: a standard deviation of 2. Without it, labels that the number
separates completely would have no best curve."""
PRIOR_LABELS = 0.5
"""Labels of either kind, added at x = 0: without labels the probability is 1/2."""
MAX_ITERATIONS = 32
MAX_STEP = 2.0
"""Largest step of intercept and slope in the first iterations. It is halved after each step that went too far."""
TOLERANCE = 1e-6
LEAST_PROBABILITY = 1e-6


class Counts(NamedTuple):
    """Numbers of labels at one value of x."""

    x: float
    negative: float
    positive: float


class LogisticCurve(NamedTuple):
    intercept: float
    slope: float

    def at(self, x: float) -> float:
        p = 1 / (1 + exp(-self.intercept - self.slope * x))
        return min(1 - LEAST_PROBABILITY, max(LEAST_PROBABILITY, p))


def fit(points: Sequence[Counts]) -> LogisticCurve:
    """Fit p = 1 / (1 + exp(-intercept - slope x)) by maximum likelihood, for |x| < 8.

    Newton's method. Its steps are bounded, so that no exponent overflows and it does not oscillate. The number of steps
    is bounded as well, so that the curve of labels that are almost separated is less steep than its limit.
    """
    negative = PRIOR_LABELS + sum(point.negative for point in points)
    positive = PRIOR_LABELS + sum(point.positive for point in points)
    weighed = [(x, n + y, y) for x, n, y in points]
    intercept, slope = log(positive / negative), 0.0
    last, last_x, most = 0.0, 0.0, MAX_STEP
    for _ in range(MAX_ITERATIONS):
        p = 1 / (1 + exp(-intercept))
        gradient, gradient_x = PRIOR_LABELS * (1 - 2 * p), -SLOPE_PRECISION * slope
        bend, bend_x, bend_xx = 2 * PRIOR_LABELS * p * (1 - p), 0.0, SLOPE_PRECISION
        for x, count, y in weighed:
            p = 1 / (1 + exp(-intercept - slope * x))
            expected = count * p
            miss = y - expected
            gradient += miss
            gradient_x += miss * x
            weight = expected * (1 - p)
            bend += weight
            weight *= x
            bend_x += weight
            bend_xx += weight * x
        determinant = bend * bend_xx - bend_x * bend_x
        step = (bend_xx * gradient - bend_x * gradient_x) / determinant
        step_x = (bend * gradient_x - bend_x * gradient) / determinant
        size = max(abs(step), abs(step_x))
        if step * last + step_x * last_x < 0:
            most /= 2  # it went too far
        share = min(1.0, most / size) if size else 1.0
        last, last_x = share * step, share * step_x
        intercept += last
        slope += last_x
        if size < TOLERANCE:
            break
    return LogisticCurve(intercept, slope)


def with_odds_times(q: float, ratio: float) -> float:
    """The probability whose odds are `ratio` times those of q."""
    odds = q * ratio
    return odds / (odds + 1 - q)


def shifted(q: float, offset: float) -> float:
    """The probability whose logit is larger by `offset`."""
    return with_odds_times(q, exp(offset))


def logit(p: float) -> float:
    p = min(1 - LEAST_PROBABILITY, max(LEAST_PROBABILITY, p))
    return log(p / (1 - p))

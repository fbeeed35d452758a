"""Mean and variance of lengths, cut at `max_tokens`, and the expected remaining length of a candidate.

With a history, lengths are log-normal. A candidate's expected length is the mean of lengths that are longer than its
present tokens (mean residual life). Without a history, the remaining length equals the present length. That is the mean
residual life of a Pareto tail with exponent 2: under heavy tails, old candidates still have long to go.

The mean over many ends does not bound the last of them, and candidates that share steps wait for each other. So
`late_remaining` is the remaining length that one candidate of twenty exceeds, by the same two distributions.

Invariants: cut lengths are never longer than before, and their std is at most half of `max_tokens`. The remaining
length is at least one token, and never goes beyond `max_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from vllm_rollout.parts.shaping.rules.censoring import LogLengthFit, bounded_log_std, length_beyond, moments_beyond

MAX_VARIATION = 1e100
"""Largest std / mean in a computation, so that its square is finite."""


@dataclass(frozen=True, slots=True)
class LengthMoments:
    """Mean and variance of lengths, in tokens."""

    mean: float
    variance: float
    num_groups: int
    """Number of groups in the averages."""
    shares: tuple[tuple[float, float], ...] = ()
    """The distribution, if known: lengths with their shares. Empty: log-normal."""

    @property
    def std(self) -> float:
        return math.sqrt(self.variance)

    def log_normal(self) -> LogLengthFit:
        """The log-normal distribution with these moments."""
        mean = max(self.mean, 1.0)
        std = bounded_log_std(math.sqrt(math.log1p(self.variance / mean**2)))
        return LogLengthFit(math.log(mean) - std**2 / 2, std, 0.0)

    def cut(self, max_tokens: int | None) -> LengthMoments:
        """The moments of the same lengths cut at `max_tokens`. None: not cut."""
        if max_tokens is None or self.mean <= 0:
            return self
        first, second = self._cut_squares(max_tokens)
        mean = min(first, self.mean, float(max_tokens))
        # no variable between 0 and max_tokens with this mean varies more
        variance = min(max(second - first**2, 0.0), self.variance, mean * (max_tokens - mean))
        return replace(self, mean=mean, variance=variance, shares=())

    def _cut_squares(self, max_tokens: int) -> tuple[float, float]:
        """First and second moment of the cut lengths."""
        if self.shares:
            cut = [(min(length, max_tokens), share) for length, share in self.shares]
            return math.fsum(x * share for x, share in cut), math.fsum(x * x * share for x, share in cut)
        log_std = math.sqrt(math.log1p(min(self.std / self.mean, MAX_VARIATION) ** 2))
        if not log_std:
            length = min(self.mean, max_tokens)
            return length, length**2
        cdf = NormalDist().cdf
        location = math.log(self.mean) - log_std**2 / 2
        cut_at = (math.log(max_tokens) - location) / log_std
        beyond = cdf(-cut_at)
        return (
            self.mean * cdf(cut_at - log_std) + max_tokens * beyond,
            (self.mean**2 + self.variance) * cdf(cut_at - 2 * log_std) + max_tokens**2 * beyond,
        )


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Statistics of observed lengths, in tokens."""

    dataset: LengthMoments | None
    """Lengths of all candidates. None before any was observed."""
    prompts: Sequence[LengthMoments | None]
    """Lengths of each requested prompt. None for a prompt without observations."""
    trust: float = 1.0
    """Share of a prompt's past deviation from the data set that its next lengths keep
    (`parts/shaping/rules/trust.py`)."""


LATE_SHARE = 0.05
"""Share of candidates that exceed `late_remaining`."""


def expected_remaining(num_tokens: int, lengths: LengthMoments | None = None, max_tokens: int | None = None) -> float:
    """Output tokens still expected of a running candidate that has `num_tokens`.

    lengths: moments of its prompt, or else of the data set. None: nothing was observed.
    """
    if lengths is None:
        remaining = float(num_tokens)
    else:
        remaining = moments_beyond(lengths.log_normal(), num_tokens)[0] - num_tokens
    return _bounded(remaining, num_tokens, max_tokens)


def late_remaining(num_tokens: int, lengths: LengthMoments | None = None, max_tokens: int | None = None) -> float:
    """Remaining output tokens that `LATE_SHARE` of such candidates exceed."""
    if lengths is None:
        remaining = num_tokens * (LATE_SHARE**-0.5 - 1)
    else:
        remaining = length_beyond(lengths.log_normal(), num_tokens, LATE_SHARE) - num_tokens
    return _bounded(remaining, num_tokens, max_tokens)


def _bounded(remaining: float, num_tokens: int, max_tokens: int | None) -> float:
    most = math.inf if max_tokens is None else max_tokens - num_tokens
    return max(1.0, min(remaining, most))

"""Mean and variance of lengths, as they would run and cut at `max_tokens`.

Invariant: what was cut is never longer, and spreads by half of `max_tokens` at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

MAX_VARIATION = 1e100
"""std / mean that is believed: its square is finite."""


@dataclass(frozen=True, slots=True)
class LengthMoments:
    """Mean and variance of lengths, in tokens."""

    mean: float
    variance: float
    num_groups: int
    """Groups that have been averaged."""
    shares: tuple[tuple[float, float], ...] = ()
    """The distribution, where it is known: lengths with their shares. Else it counts as log-normal."""

    @property
    def std(self) -> float:
        return math.sqrt(self.variance)

    def cut(self, max_tokens: int | None) -> LengthMoments:
        """Of the same lengths cut at `max_tokens`; None: not cut."""
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
    """What was seen of lengths, in tokens."""

    dataset: LengthMoments | None
    """Of all candidates; None before there were any."""
    prompts: Sequence[LengthMoments | None]
    """Of each prompt asked for; None for one never seen."""

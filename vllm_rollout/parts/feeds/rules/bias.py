"""Bias of trained groups: their lengths and rewards, compared with all groups that were admitted.

Groups that are dropped for their age are longer than the average, so training sees answers that are too short.

Invariant: an admitted group is counted once. A running group counts with the tokens that are known so far.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import sqrt
from typing import Literal, get_args

Fate = Literal["trained", "filtered", "dropped", "failed"]
FATES: tuple[Fate, ...] = get_args(Fate)
REMEDIES: dict[Fate, str] = {
    "filtered": "The filter removes longer groups: their rewards are all the same.",
    "dropped": 'Dropped groups are longer: raise max_staleness, or set on_stale to "wait".',
    "failed": "Groups that failed are longer: `failed` of each batch has the reasons.",
}
MIN_TRAINED = 8
"""Trained groups from which on lengths are compared."""


@dataclass(slots=True)
class Moments:
    """Number, mean and standard error of values that come one by one."""

    num: int = 0
    sum: float = 0.0
    sum_squares: float = 0.0

    def add(self, value: float) -> None:
        self.num += 1
        self.sum += value
        self.sum_squares += value * value

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.num + other.num, self.sum + other.sum, self.sum_squares + other.sum_squares)

    @property
    def mean(self) -> float | None:
        return self.sum / self.num if self.num else None

    @property
    def std_error(self) -> float | None:
        """Standard error of the mean. None for fewer than two values."""
        if self.num < 2:
            return None
        variance = (self.sum_squares - self.sum * self.sum / self.num) / (self.num - 1)
        return sqrt(max(0.0, variance) / self.num)


@dataclass(frozen=True, slots=True)
class GroupSize:
    """Length and reward of a group."""

    tokens: float
    """Mean tokens of its trajectories."""
    reward: float | None = None
    """Mean reward. None if it has none."""


@dataclass(slots=True)
class Share:
    """Lengths and rewards of some groups."""

    tokens: Moments = field(default_factory=Moments)
    rewards: Moments = field(default_factory=Moments)

    def add(self, size: GroupSize) -> None:
        self.tokens.add(size.tokens)
        if size.reward is not None:
            self.rewards.add(size.reward)

    def __add__(self, other: Share) -> Share:
        return Share(self.tokens + other.tokens, self.rewards + other.rewards)


def share_of(sizes: Iterable[GroupSize]) -> Share:
    share = Share()
    for size in sizes:
        share.add(size)
    return share


@dataclass(slots=True)
class BiasMeter:
    """Groups of a feed that are over, by fate."""

    shares: dict[Fate, Share] = field(default_factory=lambda: defaultdict(Share))

    def over(self, fate: Fate, size: GroupSize) -> None:
        self.shares[fate].add(size)

    def admitted(self, *others: Share) -> Share:
        """All admitted groups. `others`: groups that are not over."""
        return sum((*self.shares.values(), *others), Share())

    def warning(self, admitted: Share) -> str | None:
        """A warning if trained groups are shorter than admitted ones by more than the standard error."""
        trained, all_lengths = self.shares["trained"].tokens, admitted.tokens
        if trained.num < MIN_TRAINED or trained.mean is None or all_lengths.mean is None:
            return None
        error = trained.std_error or 0.0
        if all_lengths.mean - trained.mean <= error:
            return None
        remedy = REMEDIES.get(self._lacks_most(trained.mean), "Groups that wait or run are longer, and come later.")
        return (
            f"trained groups have {trained.mean:.1f} tokens on average, admitted ones at least {all_lengths.mean:.1f} "
            f"(standard error {error:.1f}): long answers are underrepresented. {remedy}"
        )

    def _lacks_most(self, mean: float) -> Fate:
        """The fate that has taken most tokens beyond groups of the `mean` length. "trained": none has."""
        return max(FATES, key=lambda fate: self.shares[fate].tokens.sum - mean * self.shares[fate].tokens.num)

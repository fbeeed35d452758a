"""How far a prompt's lengths say what its next ones will be.

Where a prompt's answers were twice as long as others, its next ones are twice as long, or 1.4 times, or no longer. The
slope of the new deviation over the old one, in logarithms, says which: 1 where histories hold, 0 where they tell
nothing, as after an update that changed what the policy says. All lengths may change together without any effect on it.

Invariant: between 0 and 1, and 1 before anything was seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vllm_rollout.group.lengths.moments import LengthMoments, LengthStatistics

DECAY = 0.5 ** (1 / 64)
"""A group counts half after 64 others: one training step, or two."""
PRIOR_GROUPS = 4.0
"""Groups as long as predicted, that differ by e to the power of 0.5, are what was seen before anything was."""
PRIOR_SQUARES = PRIOR_GROUPS * 0.25


@dataclass(slots=True)
class HistoryTrust:
    """Decaying sums over groups whose prompt had a history: weight, x, y, xx, xy."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def observe(self, predicted: float, mean: float) -> None:
        """A group has this mean; its prompt's history said another. Both above 0."""
        x, y = math.log(predicted), math.log(mean)
        self.weight, self.x, self.y = DECAY * self.weight + 1, DECAY * self.x + x, DECAY * self.y + y
        self.xx, self.xy = DECAY * self.xx + x * x, DECAY * self.xy + x * y

    @property
    def slope(self) -> float:
        if not self.weight:
            return 1.0
        squares = max(0.0, self.xx - self.x * self.x / self.weight)
        products = self.xy - self.x * self.y / self.weight
        return min(1.0, max(0.0, (PRIOR_SQUARES + products) / (PRIOR_SQUARES + squares)))


def trusted(history: LengthStatistics) -> list[LengthMoments | None]:
    """What each prompt's next lengths are expected to be: its own, drawn towards those of the data set."""
    dataset = history.dataset
    if dataset is None:
        return list(history.prompts)
    return [dataset if known is None else _drawn(known, dataset, history.trust) for known in history.prompts]


def _drawn(lengths: LengthMoments, dataset: LengthMoments, trust: float) -> LengthMoments:
    """They vary, by their mean, as before."""
    if trust == 1.0 or not lengths.mean or not dataset.mean:
        return lengths
    factor = (dataset.mean / lengths.mean) ** (1 - trust)
    return replace(lengths, mean=factor * lengths.mean, variance=factor**2 * lengths.variance)

"""Measures how far a prompt's past lengths predict its next ones.

If a prompt's answers were twice as long as others, its next ones may be twice as long, 1.4 times, or no longer. The
slope of the new deviation over the old one, in logarithms, measures this. It is 1 if histories hold. It is 0 if they
predict nothing, as after an update that changed the policy's answers. A common change of all lengths has no effect.

Invariant: between 0 and 1, and 1 before any observation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vllm_rollout.parts.shaping.rules.moments import LengthMoments, LengthStatistics

DECAY = 0.5 ** (1 / 64)
"""Factor by which the weight of a group falls with each later one: half after 64, one or two training steps."""
PRIOR_GROUPS = 4.0
"""Weight of the prior, in groups whose history was right and whose log lengths differ by 0.5."""
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
        """Add a group with this mean, whose prompt's history predicted another. Both are above 0."""
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
    """Expected next lengths of each prompt: its own, drawn towards those of the data set by the missing trust."""
    dataset = history.dataset
    if dataset is None:
        return list(history.prompts)
    return [dataset if known is None else _drawn(known, dataset, history.trust) for known in history.prompts]


def _drawn(lengths: LengthMoments, dataset: LengthMoments, trust: float) -> LengthMoments:
    """Move the mean, and keep the ratio of std to mean."""
    if trust == 1.0 or not lengths.mean or not dataset.mean:
        return lengths
    factor = (dataset.mean / lengths.mean) ** (1 - trust)
    return replace(lengths, mean=factor * lengths.mean, variance=factor**2 * lengths.variance)

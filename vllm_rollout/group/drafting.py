"""Draft or not, and how much: by what a step with drafts costs here, and by how many of them are accepted.

A step of n rows with k drafts makes n tokens and, of each draft, as much as it is likely to be accepted. It takes

    1 + fixed + slope * k / n

times as long as one without: `slope` is near 0 where the device waits for its memory, and 1 or more where it computes.
Drafts are taken in the order of their probability for as long as tokens per second grow. Both numbers are learned, for
each size of the batch, from steps with drafts and from a few without; probabilities are corrected by what became of
those before them.

Invariant: values in, values out; seconds are an argument. Where drafts do not pay, one step in `TRIAL_INTERVAL_STEPS`
tries a few, so that what is lost there is bounded.

Source: verification as in speculative sampling (Chen et al. 2023); drafts from siblings, Seer (2511.14617), SRT
(2601.09083); more where the batch is small, DAS (2511.13841).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

MAX_DRAFT_TOKENS = 12
"""Of one row and step."""
PLAIN_INTERVAL_STEPS = 32
"""Where drafts pay, one step in so many goes without, since what they bring is measured against that."""
TRIAL_INTERVAL_STEPS = 128
"""Where they do not pay, one step in so many tries them."""
NUM_FIRST_PLAIN = 2
"""Steps without drafts before the first one with them, at each size of the batch."""
NUM_FIRST_TRIALS = 4
"""Trials in a row at a size of the batch of which nothing is known."""
NUM_EMPTY = 8
"""Steps in a row whose drafts were not worth it, after which one in so many looks for some."""
TRIAL_RATIO = 0.25
"""Drafts of a trial, for each row."""
FIRST_FIXED, FIRST_SLOPE = 0.1, 1.0
"""What is believed before anything was seen: a draft costs what a row does, so that none pays."""
FORGETTING = 0.97
"""What a step counts when the next one has come."""
PRIOR_STEPS = 2.0
"""What was believed before counts like so many steps."""
MARGIN = 1.02
"""Tokens per second must grow by this much."""
NUM_BINS = 10
"""In which probabilities are held against what was accepted."""
PRIOR_DRAFTS = 8.0
"""The estimate itself counts in its bin like so many drafts."""


@dataclass(slots=True)
class BatchCost:
    """What steps of about one size of the batch cost."""

    fixed: float = FIRST_FIXED
    slope: float = FIRST_SLOPE
    plain_s: float | None = None
    """A step without drafts; None before one was seen."""
    num_plain: int = 0
    num_trials: int = 0
    since_plain: int = 0
    since_drafts: int = 0
    num_empty: int = 0
    """Steps in a row whose drafts were not worth it."""
    prior: tuple[float, float] = (FIRST_FIXED, FIRST_SLOPE)
    sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Of weights, x, y, xx, xy; x is drafts per row, y the time beyond that of a plain step, as a part of it."""

    @property
    def is_trial_due(self) -> bool:
        return self.num_trials < NUM_FIRST_TRIALS or self.since_drafts >= TRIAL_INTERVAL_STEPS

    def ratio(self, drafts_per_row: float) -> float:
        """How much longer a step takes, as a factor."""
        return 1 + self.fixed + self.slope * drafts_per_row if drafts_per_row else 1.0

    def took(self, drafts_per_row: float, seconds: float) -> None:
        """A step took so long."""
        if not drafts_per_row:
            self.since_plain = 0
            weight = max(0.2, 1 / (self.num_plain + 1))
            known = seconds if self.plain_s is None else min(seconds, 4 * self.plain_s)
            self.plain_s = known if self.plain_s is None else self.plain_s + weight * (known - self.plain_s)
            self.num_plain += 1
            return
        if not self.plain_s:
            return
        beyond = min(seconds / self.plain_s, 4 * self.ratio(drafts_per_row)) - 1  # a step that something held up
        new = (1.0, drafts_per_row, beyond, drafts_per_row**2, drafts_per_row * beyond)
        self.sums = [FORGETTING * old + value for old, value in zip(self.sums, new, strict=True)]
        self._fit()

    def _fit(self) -> None:
        """Least squares, drawn towards what was believed before; neither number is below 0."""
        fixed, slope = self.prior
        weight, x, y, xx, xy = self.sums
        weight, xx = weight + PRIOR_STEPS, xx + PRIOR_STEPS * TRIAL_RATIO**2
        y, xy = y + PRIOR_STEPS * fixed, xy + PRIOR_STEPS * TRIAL_RATIO**2 * slope
        self.slope = max(0.0, (weight * xy - x * y) / (weight * xx - x * x))
        self.fixed = max(0.0, (y - self.slope * x) / weight)


class DraftingRule:
    """Decides for one engine core, step by step: `longest`, `choose`, and what came of it."""

    def __init__(self) -> None:
        self._costs: dict[int, BatchCost] = {}
        """By half octaves of the batch size."""
        self._drafted = [PRIOR_DRAFTS] * NUM_BINS
        self._accepted = [PRIOR_DRAFTS * (bin + 0.5) / NUM_BINS for bin in range(NUM_BINS)]

    def longest(self, num_rows: int) -> int:
        """How many drafts of a row are worth looking for in a step of so many rows; 0: none."""
        cost = self._cost(num_rows)
        cost.since_plain += 1
        cost.since_drafts += 1
        if cost.num_plain < NUM_FIRST_PLAIN or cost.since_plain >= PLAIN_INTERVAL_STEPS:
            return 0
        if cost.num_empty < NUM_EMPTY or cost.since_drafts % NUM_EMPTY == 0 or cost.is_trial_due:
            return MAX_DRAFT_TOKENS
        return 0

    def choose(self, probabilities: Sequence[Sequence[float]]) -> list[int]:
        """How many drafts of each row to verify.

        `probabilities`: for each row of the batch, drafts or not, how likely each of its drafts is accepted together
        with all before it: never increasing.
        """
        num_rows = len(probabilities)
        cost = self._cost(num_rows)
        drafts = sorted(
            (-value, place, row)
            for row, values in enumerate(probabilities)
            for place, value in enumerate(accumulate(map(self.accepted_ratio, values), min))
        )
        best, num_taken, tokens = MARGIN, 0, float(num_rows)
        for number, (value, _, _) in enumerate(drafts, start=1):
            tokens -= value
            rate = tokens / num_rows / cost.ratio(number / num_rows)
            if rate > best:
                best, num_taken = rate, number
        cost.num_empty = 0 if num_taken else cost.num_empty + 1
        if drafts and not num_taken and cost.is_trial_due:
            num_taken = math.ceil(TRIAL_RATIO * num_rows)
            cost.num_trials += 1
        if num_taken:
            cost.since_drafts = 0
        lengths = [0] * num_rows
        for _, _, row in drafts[:num_taken]:
            lengths[row] += 1
        return lengths

    def verified(self, probabilities: Sequence[float], num_accepted: int) -> None:
        """Of one row's drafts, with these estimates, so many were accepted."""
        for place, value in enumerate(probabilities):
            bin = _bin(value)
            self._drafted[bin] += 1
            self._accepted[bin] += place < num_accepted

    def took(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """A step that only decoded so many rows, with so many drafts in all, took so long."""
        self._cost(num_rows).took(num_drafts / num_rows, seconds)

    def accepted_ratio(self, probability: float) -> float:
        """How many drafts with such an estimate have been accepted."""
        bin = _bin(probability)
        return self._accepted[bin] / self._drafted[bin]

    def _cost(self, num_rows: int) -> BatchCost:
        key = round(2 * math.log2(num_rows))
        if (cost := self._costs.get(key)) is None:
            cost = self._costs[key] = BatchCost()
            if others := [other for other in self._costs if other != key and self._costs[other].sums[0]]:
                nearest = self._costs[min(others, key=lambda other: abs(other - key))]
                cost.prior = nearest.fixed, nearest.slope
                cost.fixed, cost.slope = cost.prior
        return cost


def _bin(probability: float) -> int:
    return min(NUM_BINS - 1, int(probability * NUM_BINS))

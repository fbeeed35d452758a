"""Draft or not, and how much: by what a step with drafts costs here, and by how many of them are accepted.

A step of n rows with k drafts makes n tokens and, of each draft, as much as it is likely to be accepted. It takes

    1 + fixed + slope * k / n

times as long as one without: `slope` is near 0 where the device waits for its memory, and 1 or more where it computes.
Drafts are taken in the order of their probability for as long as tokens per second grow. Both numbers are learned, for
each size of the batch, from steps with drafts and from a few without. How likely a draft is to be accepted together
with all before it is estimated elsewhere; here estimates, in bins, are held against what became of them.

Invariant: values in, values out; seconds are an argument. Where drafts do not pay, one step in `TRIAL_INTERVAL_STEPS`
tries a few, and all trials together take `MAX_TRIAL_SHARE` of the time, so that what is lost there is bounded.

Source: verification as in speculative sampling (Chen et al. 2023); drafts from siblings, Seer (2511.14617), SRT
(2601.09083); more where the batch is small, DAS (2511.13841).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import add
from typing import NamedTuple

MAX_DRAFT_TOKENS = 12
"""The most that one row gets in one step."""
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
MAX_TRIAL_SHARE = 1 / 128
"""While trials have lost more of all seconds, at every size of the batch, none is made."""
TRIAL_WORTH = 0.5
"""A trial loses what it takes beyond a step without drafts, less this much of what its drafts are expected to bring:
a round waits for its last candidate, whose drafts they may not be."""
TRIAL_RATIO, LARGEST_TRIAL_RATIO = 0.25, 4.0
"""Drafts of a trial, for each row: more of them after one that cost next to nothing."""
CHEAP = 0.1
"""What a step with drafts takes longer, at most, to be that: as a part of one without."""
FIRST_FIXED, FIRST_SLOPE = 0.1, 1.0
"""What is believed before anything was seen: a draft costs what a row does, so that none pays."""
FORGETTING = 0.97
"""What a step counts when the next one has come."""
PRIOR_STEPS = 2.0
"""What was believed before counts like so many steps."""
MARGIN = 1.02
"""Tokens per second must grow by this much."""
NUM_BINS = 20
"""Estimates are told apart by this much: bin b has those from b / NUM_BINS on."""
PRIOR_DRAFTS = 4.0
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
    trial_ratio: float = TRIAL_RATIO
    trial_tokens: float | None = None
    """What the drafts of a trial that has not been timed are expected to bring, per row; None: there is no such."""
    num_empty: int = 0
    """Steps in a row whose drafts were not worth it."""
    prior: tuple[float, float] = (FIRST_FIXED, FIRST_SLOPE)
    sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Sums of weights, x, y, xx, xy; x is drafts per row, y the time beyond that of a plain step, as a part of it."""

    @property
    def is_trial_due(self) -> bool:
        return self.num_trials < NUM_FIRST_TRIALS or self.since_drafts >= TRIAL_INTERVAL_STEPS

    def ratio(self, drafts_per_row: float) -> float:
        """How much longer a step takes, as a factor."""
        return 1 + self.fixed + self.slope * drafts_per_row if drafts_per_row else 1.0

    def took(self, drafts_per_row: float, seconds: float) -> float:
        """A step took so long. Returns: the seconds that were lost, if it was a trial."""
        if not drafts_per_row:
            self.since_plain = 0
            weight = max(0.2, 1 / (self.num_plain + 1))
            known = seconds if self.plain_s is None else min(seconds, 4 * self.plain_s)
            self.plain_s = known if self.plain_s is None else self.plain_s + weight * (known - self.plain_s)
            self.num_plain += 1
            return 0.0
        if not self.plain_s:
            return 0.0
        beyond = min(seconds / self.plain_s, 4 * self.ratio(drafts_per_row)) - 1  # a step that something held up
        new = (1.0, drafts_per_row, beyond, drafts_per_row**2, drafts_per_row * beyond)
        more = 2 * self.trial_ratio if beyond < CHEAP else self.trial_ratio / 2
        self.trial_ratio = min(LARGEST_TRIAL_RATIO, max(TRIAL_RATIO, more))
        self.sums = [FORGETTING * old + value for old, value in zip(self.sums, new, strict=True)]
        self._fit()
        tokens, self.trial_tokens = self.trial_tokens, None
        return 0.0 if tokens is None else self.plain_s * max(0.0, beyond - TRIAL_WORTH * tokens)

    def _fit(self) -> None:
        """Least squares, drawn towards what was believed before; neither number is below 0."""
        fixed, slope = self.prior
        weight, x, y, xx, xy = self.sums
        weight, xx = weight + PRIOR_STEPS, xx + PRIOR_STEPS * TRIAL_RATIO**2
        y, xy = y + PRIOR_STEPS * fixed, xy + PRIOR_STEPS * TRIAL_RATIO**2 * slope
        self.slope = max(0.0, (weight * xy - x * y) / (weight * xx - x * x))
        self.fixed = max(0.0, (y - self.slope * x) / weight)


def increasing(sums: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Means that never decrease: neighbours that would are given their common one.

    Source: isotonic regression by pooling adjacent violators (Ayer et al. 1955).
    """
    pools: list[tuple[float, float, int]] = []
    """Sum, weight and number of members."""
    for new in zip(sums, weights, repeat(1), strict=False):
        while pools and pools[-1][0] * new[1] >= new[0] * pools[-1][1]:
            new = tuple(map(add, pools.pop(), new))
        pools.append(new)
    return [total / weight for total, weight, num in pools for _ in range(num)]


def bin_of(probability: float) -> int:
    """Where an estimate is counted."""
    return min(NUM_BINS - 1, int(probability * NUM_BINS))


def least_worthy(drafts: Sequence[float], accepted: Sequence[float], longer: Callable[[float], float]) -> int:
    """The bin from which on drafts are verified: tokens per second grow most; NUM_BINS where they do not by `MARGIN`.

    `drafts` and `accepted`: of a row, by bin. `longer`: the factor by which so many drafts per row lengthen a step.
    """
    best, least = MARGIN, NUM_BINS
    taken, tokens = 0.0, 1.0
    for bin in reversed(range(NUM_BINS)):
        taken, tokens = taken + drafts[bin], tokens + accepted[bin]
        if drafts[bin] and (rate := tokens / longer(taken)) > best:
            best, least = rate, bin
    return least


class Choice(NamedTuple):
    """Which drafts to verify."""

    least_bin: int
    """Those of this bin and above."""
    most: int
    """But no more than so many in all."""

    def lengths(self, rows: Iterable[Sequence[int]]) -> list[int]:
        """How many drafts of each row; `rows`: their bins, the likeliest first."""
        lengths, left = [], self.most
        for bins in rows:
            lengths.append(min(left, sum(bin >= self.least_bin for bin in bins)))
            left -= lengths[-1]
        return lengths


class DraftingRule:
    """Decides for one engine core, step by step: `longest`, `choose`, and what came of it."""

    def __init__(self) -> None:
        self._costs: dict[int, BatchCost] = {}
        """By half octaves of the batch size."""
        self._drafted = [PRIOR_DRAFTS] * NUM_BINS
        self._accepted = [PRIOR_DRAFTS * (bin + 0.5) / NUM_BINS for bin in range(NUM_BINS)]
        self._ratios = increasing(self._accepted, self._drafted)
        self._seconds = self._lost_s = 0.0
        """What all steps took, and what trials have lost of it."""

    def longest(self, num_rows: int) -> int:
        """How many drafts of a row are worth looking for in a step of so many rows; 0: none."""
        cost = self._cost(num_rows)
        cost.since_plain += 1
        cost.since_drafts += 1
        if cost.num_plain < NUM_FIRST_PLAIN or cost.since_plain >= PLAIN_INTERVAL_STEPS:
            return 0
        if cost.num_empty < NUM_EMPTY or cost.since_drafts % NUM_EMPTY == 0 or self._may_try(cost):
            return MAX_DRAFT_TOKENS
        return 0

    def choose(self, num_rows: int, num_drafts: Sequence[int]) -> Choice:
        """Which drafts to verify. `num_drafts`: how many there are of all rows, by bin of their estimate."""
        cost = self._cost(num_rows)
        drafts = [num / num_rows for num in num_drafts]
        accepted = [num * self.accepted_ratio(bin) for bin, num in enumerate(drafts)]
        least = least_worthy(drafts, accepted, cost.ratio)
        choice = Choice(least, sum(num_drafts[least:]))
        cost.num_empty = 0 if choice.most else cost.num_empty + 1
        if choice.most:
            cost.trial_tokens = None
        elif any(num_drafts) and self._may_try(cost):
            wanted = math.ceil(cost.trial_ratio * num_rows)
            least = max((bin for bin in range(NUM_BINS) if sum(num_drafts[bin:]) >= wanted), default=0)
            found = sum(num_drafts[least:])
            choice = Choice(least, min(found, wanted))
            cost.trial_tokens = sum(accepted[least:]) * choice.most / found
            cost.num_trials += 1
        if choice.most:
            cost.since_drafts = 0
        return choice

    def verified(self, num_drafts: Sequence[int], num_accepted: Sequence[int]) -> None:
        """So many drafts of each bin were verified, and so many of them accepted."""
        for bin, (drafted, accepted) in enumerate(zip(num_drafts, num_accepted, strict=True)):
            self._drafted[bin] += drafted
            self._accepted[bin] += accepted
        self._ratios = increasing(self._accepted, self._drafted)

    def accepted_ratio(self, bin: int) -> float:
        """How many drafts with such an estimate are accepted: no fewer than with a lower one."""
        return self._ratios[bin]

    def took(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """A step that only decoded so many rows, with so many drafts in all, took so long."""
        self._seconds += seconds
        self._lost_s += self._cost(num_rows).took(num_drafts / num_rows, seconds)

    def _may_try(self, cost: BatchCost) -> bool:
        is_timed = cost.since_drafts > 1  # a step is timed when the next one has been chosen
        return cost.is_trial_due and is_timed and self._lost_s <= MAX_TRIAL_SHARE * self._seconds

    def _cost(self, num_rows: int) -> BatchCost:
        key = round(2 * math.log2(num_rows))
        if (cost := self._costs.get(key)) is None:
            cost = self._costs[key] = BatchCost()
            if others := [other for other in self._costs if other != key and self._costs[other].sums[0]]:
                nearest = self._costs[min(others, key=lambda other: abs(other - key))]
                cost.prior = nearest.fixed, nearest.slope
                cost.fixed, cost.slope = cost.prior
        return cost

"""Decides how many drafts a step verifies, from the measured cost of drafts and the share of drafts that are accepted.

A step of n rows with k drafts makes n tokens, plus the accepted drafts. It takes

    1 + fixed + slope * k / n

times as long as a step without drafts. `slope` is near 0 where memory bounds the device, and 1 or more where
computation does. Drafts are taken in the order of their probability for as long as tokens per second grow. `fixed` and
`slope` are fitted, for each size of the batch, to steps with drafts and to a few without. The caller estimates how
likely a draft is accepted, together with all drafts before it. Here these estimates, in bins, are corrected by the
measured shares.

Invariant: values in, values out. Seconds are an argument. If drafts do not pay, one step in `TRIAL_INTERVAL_STEPS`
tries a few. All trials together take `MAX_TRIAL_SHARE` of the time, so that their loss is bounded.

Source: verification as in speculative sampling (Chen et al. 2023). Drafts from siblings: Seer (2511.14617), SRT
(2601.09083). More drafts in small batches: DAS (2511.13841).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import add
from typing import NamedTuple

from vllm_rollout.kernel.rules.prompt_key import digest_of

MAX_DRAFT_TOKENS = 12
"""Most drafts of one row in one step."""
PLAIN_INTERVAL_STEPS = 32
"""If drafts pay, one step in so many runs without drafts, as the base of the measurement."""
TRIAL_INTERVAL_STEPS = 128
"""If drafts do not pay, one step in so many tries drafts."""
NUM_FIRST_PLAIN = 2
"""Steps without drafts before the first step with drafts, at each size of the batch."""
NUM_FIRST_TRIALS = 4
"""Consecutive trials at a size of the batch without measurements."""
NUM_EMPTY = 8
"""Consecutive steps without drafts worth verifying, after which only one step in so many searches for drafts."""
MAX_TRIAL_SHARE = 1 / 128
"""No trial is made while trials have lost more than this share of all seconds, over all sizes of the batch."""
TRIAL_WORTH = 0.5
"""Share of a trial's expected tokens that reduces its loss, the time beyond a step without drafts.

Below 1, since a round waits for its last candidate, and the drafts may be another candidate's.
"""
TRIAL_RATIO, LARGEST_TRIAL_RATIO = 0.25, 4.0
"""Smallest and largest number of drafts of a trial, per row. It grows after cheap trials."""
CHEAP = 0.1
"""Largest extra time of a cheap trial, as a share of a step without drafts."""
FIRST_FIXED, FIRST_SLOPE = 0.1, 1.0
"""Costs before any measurement: a draft costs as much as a row, so that no draft pays."""
FORGETTING = 0.97
"""Factor by which the weight of each measurement falls with the next one."""
PRIOR_STEPS = 2.0
"""Weight of the prior costs, in steps."""
MARGIN = 1.02
"""Smallest factor by which tokens per second must grow."""
NUM_BINS = 20
"""Number of bins of estimates: bin b holds estimates from b / NUM_BINS on."""
PRIOR_DRAFTS = 4.0
"""Weight of the estimate itself in its bin, in drafts."""


@dataclass(slots=True)
class BatchCost:
    """Cost of steps of about one size of the batch."""

    fixed: float = FIRST_FIXED
    slope: float = FIRST_SLOPE
    plain_s: float | None = None
    """Duration of a step without drafts, in seconds. None before the first one."""
    num_plain: int = 0
    num_trials: int = 0
    since_plain: int = 0
    since_drafts: int = 0
    trial_ratio: float = TRIAL_RATIO
    trial_tokens: float | None = None
    """Expected accepted drafts per row of a trial that has not been timed. None: there is no such trial."""
    num_empty: int = 0
    """Consecutive steps without drafts worth verifying."""
    prior: tuple[float, float] = (FIRST_FIXED, FIRST_SLOPE)
    sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Weighted sums of 1, x, y, xx, xy. x: drafts per row. y: extra time, as a share of a step without drafts."""

    @property
    def is_trial_due(self) -> bool:
        return self.num_trials < NUM_FIRST_TRIALS or self.since_drafts >= TRIAL_INTERVAL_STEPS

    def ratio(self, drafts_per_row: float) -> float:
        """Duration of a step with so many drafts per row, as a multiple of a step without drafts."""
        return 1 + self.fixed + self.slope * drafts_per_row if drafts_per_row else 1.0

    def took(self, drafts_per_row: float, seconds: float) -> float:
        """Record the duration of a step. Returns the seconds that it lost, if it was a trial."""
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
        """Fit both costs by least squares, with the prior. Neither falls below 0."""
        fixed, slope = self.prior
        weight, x, y, xx, xy = self.sums
        weight, xx = weight + PRIOR_STEPS, xx + PRIOR_STEPS * TRIAL_RATIO**2
        y, xy = y + PRIOR_STEPS * fixed, xy + PRIOR_STEPS * TRIAL_RATIO**2 * slope
        self.slope = max(0.0, (weight * xy - x * y) / (weight * xx - x * x))
        self.fixed = max(0.0, (y - self.slope * x) / weight)


def increasing(sums: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Means that never decrease: adjacent means that would decrease are replaced by their common mean.

    Source: isotonic regression by pooling adjacent violators (Ayer et al. 1955).
    """
    pools: list[tuple[float, float, int]] = []
    """Sum, weight and number of members of each pool."""
    for new in zip(sums, weights, repeat(1), strict=False):
        while pools and pools[-1][0] * new[1] >= new[0] * pools[-1][1]:
            new = tuple(map(add, pools.pop(), new))
        pools.append(new)
    return [total / weight for total, weight, num in pools for _ in range(num)]


def bin_of(probability: float) -> int:
    """Bin of an estimated probability."""
    return min(NUM_BINS - 1, int(probability * NUM_BINS))


def least_worthy(drafts: Sequence[float], accepted: Sequence[float], longer: Callable[[float], float]) -> int:
    """Lowest bin whose drafts are verified, for the most tokens per second. NUM_BINS if these do not grow by `MARGIN`.

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
    """The drafts to verify in one step."""

    least_bin: int
    """Lowest bin whose drafts are verified."""
    most: int
    """Most drafts of all rows together."""

    def lengths(self, rows: Iterable[Sequence[int]]) -> list[int]:
        """Number of drafts to verify, by row. `rows`: bins of each row's drafts, the likeliest first."""
        lengths, left = [], self.most
        for bins in rows:
            lengths.append(min(left, sum(bin >= self.least_bin for bin in bins)))
            left -= lengths[-1]
        return lengths


class DraftingRule:
    """Decides for one engine core, step by step: `longest`, then `choose`, then `verified` and `took` with the
    results."""

    def __init__(self) -> None:
        self._costs: dict[int, BatchCost] = {}
        """Costs by half octaves of the batch size."""
        self._drafted = [PRIOR_DRAFTS] * NUM_BINS
        self._accepted = [PRIOR_DRAFTS * (bin + 0.5) / NUM_BINS for bin in range(NUM_BINS)]
        self._ratios = increasing(self._accepted, self._drafted)
        self._seconds = self._lost_s = 0.0
        """Seconds of all steps, and the seconds that trials lost."""

    def longest(self, num_rows: int) -> int:
        """Most drafts of a row worth a search, in a step of `num_rows` rows. 0: none."""
        cost = self._cost(num_rows)
        cost.since_plain += 1
        cost.since_drafts += 1
        if cost.num_plain < NUM_FIRST_PLAIN or cost.since_plain >= PLAIN_INTERVAL_STEPS:
            return 0
        if cost.num_empty < NUM_EMPTY or cost.since_drafts % NUM_EMPTY == 0 or self._may_try(cost):
            return MAX_DRAFT_TOKENS
        return 0

    def choose(self, num_rows: int, num_drafts: Sequence[int]) -> Choice:
        """Choose the drafts to verify. `num_drafts`: number of drafts of all rows, by bin of their estimate."""
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
        """Record the number of verified and of accepted drafts, by bin."""
        for bin, (drafted, accepted) in enumerate(zip(num_drafts, num_accepted, strict=True)):
            self._drafted[bin] += drafted
            self._accepted[bin] += accepted
        self._ratios = increasing(self._accepted, self._drafted)

    def accepted_ratio(self, bin: int) -> float:
        """Share of the drafts of a bin that are accepted. It never falls from one bin to the next."""
        return self._ratios[bin]

    def took(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Record the duration of a step that only decoded, with its rows and its drafts in all."""
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


def draft_key(namespace: str, token_ids: Sequence[int], adapter: str) -> str:
    """The name of a prompt whose answers serve as drafts for each other.

    The time of an answer reveals other answers of the prompt, so that drafts are not shared between namespaces.
    """
    return json.dumps([namespace, digest_of(token_ids), adapter])

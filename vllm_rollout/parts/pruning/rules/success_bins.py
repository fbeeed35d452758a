"""Success probability per bin of the normalized score, from counts of labels per bin.

`paper_table` is ARRoL A.4. Counts of both labels, smoothed after Laplace, are the likelihoods. Bayes' rule with the
prior of the same counts gives q. A bin without labels there tends to 1/2, or to another value set by the two sums.

`combined_table`, ours, is a logistic curve through all labels, corrected by bins with enough labels. The labels of a
bin are joined by `trust` pseudo-labels, of which the curve's share succeeds. So a bin without labels has the curve's
value, and a bin with many has theirs. If the curve is right, the labels of a bin only add noise. If it is wrong, only
they are right. `trust` is the value of TRUSTS with which each label is predicted best from all the others. In both
tables a label counts fully in its own bin and less and less in the next `spread` bins on either side, a triangle.

Invariant: a table depends only on the counts, and every probability lies in (0, 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import log
from statistics import fmean
from typing import NamedTuple

from vllm_rollout.parts.pruning.rules.logistic import Counts, LogisticCurve, fit

NUM_JOINED = 32
"""Number of joined bins in fits over all labels. As good as all bins, and four times as fast."""
REACH = 1.0
"""Standardized score by which the curve goes on beyond all labels. Beyond that it is level."""
TRUSTS = (1024.0, 256.0, 64.0, 16.0, 4.0, 1.0)
"""Numbers of pseudo-labels in a bin, of which the best is taken."""
TRUST_LOSS = 0.2
"""Squared errors by which less trust in the curve must be better, since chance makes a difference too."""


def paper_table(
    negatives: Sequence[float], positives: Sequence[float], spread: int, smoothing: float
) -> tuple[float, ...]:
    """Source: ARRoL A.4, with spread = 0 as printed. The prior is 1/2 while there are no labels."""
    total = sum(negatives) + sum(positives)
    prior = sum(positives) / total if total else 0.5
    likelihoods = []
    for counts in (negatives, positives):
        near = spread_out(counts, spread)
        weight = sum(near) + smoothing * len(counts)
        likelihoods.append([(count + smoothing) / weight for count in near])
    return tuple(
        prior * positive / (prior * positive + (1 - prior) * negative)
        for negative, positive in zip(*likelihoods, strict=True)
    )


def combined_table(negatives: Sequence[float], positives: Sequence[float], spread: int) -> tuple[float, ...]:
    """The table of `negatives` and `positives` [num_bins], in effective labels."""
    joined = _joined_bins(len(negatives))
    sums = [Counts(part.x, sum(negatives[part.bins]), sum(positives[part.bins])) for part in joined]
    known = [each for each in sums if each.negative or each.positive]
    curve = fit(known)
    near_positives = spread_out(positives, spread)
    near_all = [n + y for n, y in zip(spread_out(negatives, spread), near_positives, strict=True)]
    middles = [part.middle for part in joined]
    trust = _best_trust(curve, sums, [near_all[b] for b in middles], [near_positives[b] for b in middles])
    low, high = (known[0].x - REACH, known[-1].x + REACH) if known else (0.0, 0.0)
    xs = [min(high, max(low, x)) for x in bin_logits(len(negatives))]
    return tuple((y + trust * curve.at(x)) / (n + trust) for x, n, y in zip(xs, near_all, near_positives, strict=True))


def _best_trust(
    curve: LogisticCurve, joined: Sequence[Counts], near_all: Sequence[float], near_positives: Sequence[float]
) -> float:
    """The trust with the least squared error, each label predicted from those near it without itself."""
    known = [
        (part.negative, part.positive, curve.at(part.x), max(1.0, n) - 1, y)
        for part, n, y in zip(joined, near_all, near_positives, strict=True)
        if part.negative or part.positive
    ]
    best, least = TRUSTS[0], float("inf")
    for trust in TRUSTS:
        loss = 0.0
        for negative, positive, p, others, successes in known:
            expected = successes + trust * p
            others += trust
            of_failure = min(1.0, expected / others)
            of_success = 1 - max(0.0, (expected - 1) / others)
            loss += negative * of_failure * of_failure + positive * of_success * of_success
        if loss < least - TRUST_LOSS:
            best, least = trust, loss
    return best


def spread_out(counts: Sequence[float], spread: int) -> list[float]:
    """Each bin's count and those of the next `spread` bins on either side, with weights that fall linearly.

    A triangle is a box on a box, and sums over a box are differences of sums.
    """
    if not spread:
        return list(counts)
    margin = [0.0] * spread
    return [count / (spread + 1) for count in _boxes(_boxes([*margin, *counts, *margin], spread + 1), spread + 1)]


def _boxes(counts: Sequence[float], size: int) -> list[float]:
    sums = list(accumulate(counts, initial=0.0))
    return [end - start for start, end in zip(sums, sums[size:], strict=False)]


class _JoinedBins(NamedTuple):
    bins: slice
    middle: int
    x: float


@cache
def _joined_bins(num_bins: int) -> tuple[_JoinedBins, ...]:
    xs, step = bin_logits(num_bins), max(1, num_bins // NUM_JOINED)
    starts = range(0, num_bins, step)
    return tuple(
        _JoinedBins(slice(start, start + step), min(start + step // 2, num_bins - 1), fmean(xs[start : start + step]))
        for start in starts
    )


@cache
def bin_logits(num_bins: int) -> tuple[float, ...]:
    """The standardized score in the middle of each bin of its sigmoid."""
    return tuple(log((b + 0.5) / (num_bins - b - 0.5)) for b in range(num_bins))

"""How far rounds change which prompts are trained on when. Invariant: numbers are of what was returned.

Tail batching returns every prompt once per epoch; what it changes is the order, in which short prompts come first
(DARTS Appendix H calls that distribution bias).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from vllm_rollout.simulator.rounds.outcome import RunOutcome


@dataclass(frozen=True, slots=True)
class Fairness:
    least_returns: int
    """Of a prompt, over the whole run."""
    most_returns: int
    deferred_share: float
    """Of prompts that were handed in: those that came back later than their round."""
    mean_wait: float
    """Rounds between being handed in and coming back, over all prompts."""
    max_wait: int
    order_correlation: float
    """Rank correlation of a prompt's mean length and the round it came back in, within an epoch, mean over epochs."""
    short_departure: float | None
    """Mean over short rounds of (mean length of the round / mean length of the run) - 1; None without any."""
    long_departure: float | None
    """The same of long rounds."""
    largest_departure: float
    """The largest of any full round, without its sign."""


def fairness_of(outcome: RunOutcome) -> Fairness:
    returned = outcome.returned
    counts = Counter(prompt.prompt_id for prompt in returned)
    waits = [prompt.round - prompt.handed_in for prompt in returned]
    epochs = sorted({prompt.epoch for prompt in returned})
    correlations = []
    for epoch in epochs:
        own = [prompt for prompt in returned if prompt.epoch == epoch]
        correlations.append(
            rank_correlation([fmean(prompt.lengths) for prompt in own], [prompt.round for prompt in own])
        )
    mean = fmean(length for prompt in returned for length in prompt.lengths)
    departures = {
        kind: [fmean(its.lengths) / mean - 1 for its in outcome.of(kind) if its.lengths] for kind in ("short", "long")
    }
    return Fairness(
        min(counts.values()),
        max(counts.values()),
        sum(wait > 0 for wait in waits) / len(waits),
        fmean(waits),
        max(waits),
        fmean(correlations),
        *(fmean(values) if values else None for values in departures.values()),
        max((abs(value) for values in departures.values() for value in values), default=0.0),
    )


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's; equal values share their mean rank. 0 where one side does not vary."""
    ranks = [_ranks(np.asarray(values)) for values in (left, right)]
    if any(np.ptp(its) == 0 for its in ranks):
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]

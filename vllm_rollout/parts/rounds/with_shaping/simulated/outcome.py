"""Measurements of simulated runs, and how far rounds change the order in which prompts are trained on.

Tail batching returns every prompt once per epoch. It changes the order: short prompts come first. DARTS Appendix H
calls that distribution bias.

Invariant: generated tokens = returned tokens + wasted tokens. Fairness is measured on returned prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np

from vllm_rollout.parts.rounds.rules.fields import RoundKind
from vllm_rollout.parts.rounds.with_shaping.simulated.data import RunConditions
from vllm_rollout.parts.rounds.with_shaping.simulated.settings import RoundSetting, responses_only


@dataclass(frozen=True, slots=True)
class ReturnedPrompt:
    """A returned prompt."""

    prompt_id: str
    epoch: int
    handed_in: int
    """Round for which the prompt was handed in."""
    round: int
    """Round that returned the prompt."""
    lengths: tuple[int, ...]
    """Lengths of the prompt's returned trajectories, in tokens."""


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """Measurements of one round."""

    number: int
    kind: RoundKind
    is_last: bool
    """True if too few prompts were left for a short round."""
    seconds: float
    returned: tuple[ReturnedPrompt, ...]
    num_started: int
    num_deferred: int
    generated_tokens: int
    num_moves: int = 0
    freed_rank_s: float = 0.0
    """Seconds from each freed rank's last step to the end of the round, summed."""

    @property
    def lengths(self) -> list[int]:
        return [length for prompt in self.returned for length in prompt.lengths]

    @property
    def returned_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def max_tokens(self) -> int:
        return max(self.lengths, default=0)


@dataclass(frozen=True)
class RunOutcome:
    """One setting over all epochs. On an ideal machine seconds are steps."""

    setting: RoundSetting
    rounds: tuple[RoundOutcome, ...]
    num_preemptions: int = 0
    whole_epochs: bool = False
    """True if all prompts of an epoch came back before the next one began."""

    def of(self, kind: RoundKind) -> list[RoundOutcome]:
        """Rounds of a kind among `full_rounds`."""
        return [its for its in self.full_rounds if its.kind == kind]

    @cached_property
    def full_rounds(self) -> Sequence[RoundOutcome]:
        """Rounds of whole periods: all rounds up to the last long round that the queue filled.

        With whole epochs, or without such a long round, these are all rounds. Synchronous rounds count if they return
        their full number of prompts.
        """
        if self.whole_epochs:
            return self.rounds
        full = [its for its in self.rounds if not its.is_last]
        longs = [position for position, its in enumerate(full) if its.kind == "long"]
        if longs:
            return full[: longs[-1] + 1]
        return full if full and self.setting.is_synchronous else self.rounds

    @property
    def has_full_period(self) -> bool:
        if self.whole_epochs or self.setting.is_synchronous:
            return True
        return any(its.kind == "long" and not its.is_last for its in self.rounds)

    @cached_property
    def round_s(self) -> float:
        """Mean seconds of a round, over whole periods."""
        return float(np.mean([its.seconds for its in self.full_rounds]))

    @cached_property
    def prompt_s(self) -> float:
        """Seconds of whole periods per returned prompt. A long round may return fewer prompts than a short one."""
        return sum(its.seconds for its in self.full_rounds) / sum(len(its.returned) for its in self.full_rounds)

    @property
    def seconds(self) -> float:
        """Seconds of the whole run, including its last rounds."""
        return sum(its.seconds for its in self.rounds)

    @cached_property
    def generated_tokens(self) -> int:
        return sum(its.generated_tokens for its in self.rounds)

    @cached_property
    def returned_tokens(self) -> int:
        return sum(its.returned_tokens for its in self.rounds)

    @property
    def num_moves(self) -> int:
        return sum(its.num_moves for its in self.rounds)

    @property
    def freed_rank_s(self) -> float:
        return sum(its.freed_rank_s for its in self.rounds)

    @property
    def wasted_tokens(self) -> int:
        return self.generated_tokens - self.returned_tokens

    @cached_property
    def returned(self) -> Sequence[ReturnedPrompt]:
        """Returned prompts in the order of rounds."""
        return [prompt for its in self.rounds for prompt in its.returned]


def mean_seconds(rounds: Sequence[RoundOutcome]) -> float | None:
    return float(np.mean([its.seconds for its in rounds])) if rounds else None


def mean_of_longest(rounds: Sequence[RoundOutcome]) -> float | None:
    """Mean over rounds of their longest returned trajectory, in tokens."""
    return float(np.mean([its.max_tokens for its in rounds])) if rounds else None


def percentile_of_lengths(rounds: Sequence[RoundOutcome], percent: float) -> float | None:
    """Percentile of the lengths of all returned trajectories of these rounds, in tokens."""
    lengths = [length for its in rounds for length in its.lengths]
    return float(np.percentile(lengths, percent)) if lengths else None


@dataclass(frozen=True, slots=True)
class RoundSweep:
    outcomes: tuple[RunOutcome, ...]
    """Outcomes by setting, the synchronous one first."""
    conditions: RunConditions

    @property
    def baseline(self) -> RunOutcome:
        return self.outcomes[0]

    @property
    def fastest(self) -> RunOutcome:
        return min(self.outcomes, key=lambda outcome: outcome.prompt_s)

    @property
    def span(self) -> str:
        """Span of the mean round, for people."""
        return "whole epochs" if self.conditions.whole_epochs else "whole periods of short and long rounds"

    def speed_up(self, outcome: RunOutcome) -> float:
        """Speed-up over synchronous rounds, per returned prompt, in whole periods."""
        return self.baseline.prompt_s / outcome.prompt_s

    def speed_up_of_run(self, outcome: RunOutcome) -> float:
        """Speed-up over synchronous rounds, from the first round to the last."""
        return self.baseline.seconds / outcome.seconds

    def responses_only_of(self, outcome: RunOutcome) -> RunOutcome | None:
        """Outcome of equal groups in rounds that wait for all their prompts, or None."""
        wanted = responses_only(outcome.setting)
        return next((its for its in self.outcomes if its.setting == wanted and its is not self.baseline), None)

    def length_bias(self, outcome: RunOutcome) -> float:
        """Relative difference of the mean returned length to that of synchronous rounds. Positive: longer."""
        mean = outcome.returned_tokens / sum(len(prompt.lengths) for prompt in outcome.returned)
        baseline = self.baseline
        return mean / (baseline.returned_tokens / sum(len(prompt.lengths) for prompt in baseline.returned)) - 1


@dataclass(frozen=True, slots=True)
class Fairness:
    least_returns: int
    """Smallest number of times that a prompt is returned in the whole run."""
    most_returns: int
    deferred_share: float
    """Share of prompts that came back in a later round than the one for which they were handed in."""
    mean_wait: float
    """Rounds from a prompt's hand-in to its return, mean over all prompts."""
    max_wait: int
    order_correlation: float
    """Rank correlation of a prompt's mean length and the round that returned it, within an epoch, mean over epochs."""
    short_departure: float | None
    """Mean over short rounds of (mean length of the round / mean length of the run) - 1. None without short rounds."""
    long_departure: float | None
    """Mean over long rounds of (mean length of the round / mean length of the run) - 1. None without long rounds."""
    largest_departure: float
    """Largest departure of any full round, without its sign."""


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
    """Spearman's rank correlation. Equal values share their mean rank. 0 if one side does not vary."""
    ranks = [_ranks(np.asarray(values)) for values in (left, right)]
    if any(np.ptp(its) == 0 for its in ranks):
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]

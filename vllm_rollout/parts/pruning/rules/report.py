"""Report on signals and pruning from rewarded candidates: accuracy of the scores, and savings.

Invariants: every score was given before its reward was known. A report depends only on the candidates, the numbers of
verdicts and the audit report in its arguments. So candidates of several ranks are reported together like those of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import fsum
from operator import attrgetter
from typing import Any, NamedTuple

from vllm_rollout.checks import MAX_SCORE, flag, integer, listed, number, shown, text
from vllm_rollout.kernel.rules.types import BASE_MODEL, Signal
from vllm_rollout.parts.pruning.rules.pruning_plan import SIGNALS, HeadKey
from vllm_rollout.parts.pruning.rules.race_bias import AuditReport
from vllm_rollout.parts.pruning.rules.success import MAX_LABEL_WEIGHT

NUM_RELIABILITY_BINS = 10

LEAST_SURVIVAL = 1e-9
"""Smallest survival probability in the report, so that sums stay finite."""

MAX_GROUP_CHARS = 2**16
"""Longest name of a group in a state, in characters."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A score with its reward."""

    score: float
    success_probability: float | None
    """None: calibration had too few labels when the candidate was scored."""
    positive: bool
    weight: float
    """1 / survival probability of the candidate."""
    group: str
    """The prompt, by which candidates are grouped for the AUC within groups."""


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Labelled candidates whose predicted success probability lies in one tenth of [0, 1]."""

    lower: float
    upper: float
    num_labels: int
    mean_predicted: float | None
    mean_observed: float | None
    """Success rate, labels weighted by 1 / survival probability."""


@dataclass(frozen=True, slots=True)
class SignalReport:
    """Accuracy of one signal's predictions, each made before its reward was known."""

    num_positive: int
    num_negative: int
    auc: float | None
    """Area under the ROC curve, weighted by 1 / survival probability. None without labels of both kinds."""
    within_group_auc: float | None
    """The mean over prompts that have labels of both kinds."""
    brier: float | None
    """Mean squared error of the success probability, weighted as the AUC. None without calibrated scores."""
    bins: Sequence[ReliabilityBin]


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """Effect of pruning on recently rewarded candidates: real (active) or hypothetical (shadow). Without cold
    starts."""

    num_scored: int
    """Active: candidates judged. Shadow: candidates judged and rewarded."""
    num_pruned: int
    """Candidates pruned, or in shadow mode marked."""
    tokens_saved: int
    """Shadow: tokens that marked candidates generated after `detection_length`.

    Active, as an estimate: pruned candidates times the mean of the tokens that survivors generated after it. Each
    survivor is weighted by its odds of having been pruned.
    """
    positive_ratio: float | None
    """Success rate of all candidates. In active mode that of the survivors, weighted by 1 / survival probability."""
    survivors_positive_ratio: float | None
    """Success rate of the candidates that were, or would have been, kept."""


@dataclass(frozen=True, slots=True)
class RulesReport:
    """Report on the rules of one detection length."""

    signals: Mapping[Signal, SignalReport]
    active: ShadowReport
    shadow: ShadowReport
    audit: AuditReport


@dataclass(frozen=True, slots=True)
class HeadInfo:
    """Identity and training state of a quality head."""

    detection_length: int
    hidden_size: int
    version: int
    num_steps: int
    """Number of optimizer steps."""
    num_labels: int
    """Number of labels used in training."""
    adapter: str = BASE_MODEL
    """The LoRA adapter whose candidates it scores. `BASE_MODEL`: none."""

    @property
    def key(self) -> HeadKey:
        return HeadKey(self.detection_length, self.adapter)


def signal_report(predictions: Sequence[Prediction]) -> SignalReport:
    num_positive = sum(prediction.positive for prediction in predictions)
    return SignalReport(
        num_positive=num_positive,
        num_negative=len(predictions) - num_positive,
        auc=auc(predictions),
        within_group_auc=within_group_auc(predictions),
        brier=brier(predictions),
        bins=reliability_bins(predictions),
    )


def auc(predictions: Iterable[Prediction]) -> float | None:
    """Weighted probability that a positive scores above a negative, where ties count half. None without both labels."""
    below = concordant = positives = 0.0
    for _, tied in groupby(sorted(predictions, key=attrgetter("score")), key=attrgetter("score")):
        here = list(tied)
        positive = fsum(prediction.weight for prediction in here if prediction.positive)
        negative = fsum(prediction.weight for prediction in here if not prediction.positive)
        concordant += positive * (below + negative / 2)
        below += negative
        positives += positive
    return concordant / (positives * below) if positives and below else None


def within_group_auc(predictions: Iterable[Prediction]) -> float | None:
    """The mean AUC over groups with both labels, each group with the same weight. None when there is no such group."""
    ordered = sorted(predictions, key=attrgetter("group"))
    values = [value for _, group in groupby(ordered, key=attrgetter("group")) if (value := auc(group)) is not None]
    return fsum(values) / len(values) if values else None


def brier(predictions: Iterable[Prediction]) -> float | None:
    """Weighted mean squared error of the success probabilities."""
    calibrated = [(p.weight, (q - p.positive) ** 2) for p, q in _calibrated(predictions)]
    return weighted_mean(calibrated)


def reliability_bins(predictions: Iterable[Prediction]) -> list[ReliabilityBin]:
    """Predicted against observed success, by predicted success. The last bin includes 1."""
    num_bins = NUM_RELIABILITY_BINS
    members: list[list[tuple[Prediction, float]]] = [[] for _ in range(num_bins)]
    for prediction, q in _calibrated(predictions):
        members[min(num_bins - 1, int(q * num_bins))].append((prediction, q))
    return [
        ReliabilityBin(
            lower=i / num_bins,
            upper=(i + 1) / num_bins,
            num_labels=len(here),
            mean_predicted=weighted_mean((p.weight, q) for p, q in here),
            mean_observed=weighted_mean((p.weight, float(p.positive)) for p, _ in here),
        )
        for i, here in enumerate(members)
    ]


def weighted_mean(pairs: Iterable[tuple[float, float]]) -> float | None:
    """The mean of (weight, value) pairs. None without weight."""
    pairs = list(pairs)
    total = fsum(weight for weight, _ in pairs)
    return fsum(weight * value for weight, value in pairs) / total if total else None


def _calibrated(predictions: Iterable[Prediction]) -> list[tuple[Prediction, float]]:
    """Predictions with a success probability, and this probability."""
    return [(p, p.success_probability) for p in predictions if p.success_probability is not None]


class RewardedCandidate(NamedTuple):
    """A rewarded candidate, as the report needs it."""

    scores: Mapping[Signal, float]
    """Scores by signal. The head's are standardized by its version's scale, so that those of all versions compare."""
    success_probabilities: Mapping[Signal, float]
    """Predictions made before the reward, by signal. Only of signals with enough labels then."""
    positive: bool
    weight: float
    """1 / survival probability, clipped. 1 in shadow mode."""
    group: str
    active: bool
    keep: bool
    survival_probability: float
    cold: bool
    tokens_after: int
    """Tokens generated after `detection_length`."""
    is_sample: bool = False
    """True if its group did not race."""

    @classmethod
    def from_state(cls, values: Any) -> RewardedCandidate:
        """Restore a candidate. Raises: ValueError for a state that no candidate can have."""
        outcome = cls(*listed(values, "an outcome", length=len(cls._fields)))
        return cls(
            scores=by_signal(outcome.scores, "a score of an outcome", -MAX_SCORE, MAX_SCORE),
            success_probabilities=by_signal(outcome.success_probabilities, "a success probability", 0.0, 1.0),
            positive=flag(outcome.positive, "an outcome's success"),
            weight=number(outcome.weight, "weight of an outcome", 0.0, MAX_LABEL_WEIGHT, above=True),
            group=text(outcome.group, "group of an outcome", MAX_GROUP_CHARS),
            active=flag(outcome.active, "active of an outcome"),
            keep=flag(outcome.keep, "keep of an outcome"),
            survival_probability=number(outcome.survival_probability, "a survival probability", 0.0, 1.0, above=True),
            cold=flag(outcome.cold, "cold of an outcome"),
            tokens_after=integer(outcome.tokens_after, "tokens_after of an outcome"),
            is_sample=flag(outcome.is_sample, "is_sample of an outcome"),
        )


def by_signal(values: Any, where: str, least: float, most: float) -> dict[Signal, float]:
    """Numbers by signal, from a state. Raises: ValueError for another signal, or a number outside [`least`, `most`]."""
    if not isinstance(values, Mapping) or not set(values) <= set(SIGNALS):
        raise ValueError(f"{where}: expected numbers by signal ({', '.join(SIGNALS)}), got {shown(values)}")
    return {signal: number(value, where, least, most) for signal, value in values.items()}


def rules_report(
    outcomes: Iterable[RewardedCandidate], num_judged: int, num_pruned: int, audit: AuditReport
) -> RulesReport:
    """Report on the newest rewarded candidates, and the newest verdicts of active pruning.

    The weights of positive labels of races are corrected by audits (`parts/pruning/rules/race_bias.py`).
    """
    weight = audit.raced_success_weight
    outcomes = [
        outcome._replace(weight=outcome.weight * weight) if outcome.positive and not outcome.is_sample else outcome
        for outcome in outcomes
    ]
    judged = [outcome for outcome in outcomes if not outcome.cold]
    return RulesReport(
        signals={signal: signal_report(_predictions(outcomes, signal)) for signal in SIGNALS},
        active=_active_report([o for o in judged if o.active], num_judged, num_pruned),
        shadow=_shadow_report([o for o in judged if not o.active]),
        audit=audit,
    )


def _predictions(outcomes: Iterable[RewardedCandidate], signal: Signal) -> list[Prediction]:
    return [
        Prediction(
            outcome.scores[signal],
            outcome.success_probabilities.get(signal),
            outcome.positive,
            outcome.weight,
            outcome.group,
        )
        for outcome in outcomes
        if signal in outcome.scores
    ]


def _active_report(outcomes: list[RewardedCandidate], num_judged: int, num_pruned: int) -> ShadowReport:
    # a survivor kept with probability p stands for (1 - p) / p pruned candidates like it
    odds = [(1 / max(o.survival_probability, LEAST_SURVIVAL) - 1, float(o.tokens_after)) for o in outcomes]
    tokens_each = weighted_mean(odds)
    return ShadowReport(
        num_scored=num_judged,
        num_pruned=num_pruned,
        tokens_saved=round(num_pruned * (tokens_each or 0.0)),
        positive_ratio=weighted_mean((o.weight, float(o.positive)) for o in outcomes),
        survivors_positive_ratio=weighted_mean(
            (o.weight * o.survival_probability, float(o.positive)) for o in outcomes
        ),
    )


def _shadow_report(outcomes: list[RewardedCandidate]) -> ShadowReport:
    marked = [o for o in outcomes if not o.keep]
    return ShadowReport(
        num_scored=len(outcomes),
        num_pruned=len(marked),
        tokens_saved=sum(o.tokens_after for o in marked),
        positive_ratio=weighted_mean((o.weight, float(o.positive)) for o in outcomes),
        survivors_positive_ratio=weighted_mean((o.weight, float(o.positive)) for o in outcomes if o.keep),
    )

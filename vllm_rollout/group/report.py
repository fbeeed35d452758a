"""How well scores foretold rewards. Invariant: every score was given before its reward was known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import fsum

from vllm_rollout.group.race_bias import AuditReport
from vllm_rollout.group.types import BASE_MODEL, HeadKey, Signal

NUM_RELIABILITY_BINS = 10


@dataclass(frozen=True, slots=True)
class Prediction:
    """A score whose reward is known now."""

    score: float
    success_probability: float | None
    """None: calibration knew too little when the candidate was scored."""
    positive: bool
    weight: float
    """1 / survival probability."""
    group: str
    """The prompt; what groups candidates for the AUC within groups."""


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
    """How well one signal foretold the rewards, each score given before its reward was known."""

    num_positive: int
    num_negative: int
    auc: float | None
    """Area under the ROC curve, weighted by 1 / survival probability; None without labels of both kinds."""
    within_group_auc: float | None
    """The mean over prompts that have labels of both kinds."""
    brier: float | None
    """Mean squared error of the success probability, weighted as the AUC; None without calibrated scores."""
    bins: Sequence[ReliabilityBin]


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """What pruning did (active), or would have done (shadow), to recently rewarded candidates; cold starts left out."""

    num_scored: int
    """Active: candidates judged. Shadow: candidates judged and rewarded."""
    num_pruned: int
    """Pruned, or in shadow mode marked."""
    tokens_saved: int
    """Shadow: tokens that marked candidates generated after `detection_length`. Active, where nobody knows: pruned
    candidates times the mean of what survivors generated after it, each weighted by its odds of having been pruned."""
    positive_ratio: float | None
    """Success rate of all candidates: in active mode of the survivors, weighted by 1 / survival probability."""
    survivors_positive_ratio: float | None
    """Success rate of those that were, or would have been, kept."""


@dataclass(frozen=True, slots=True)
class RulesReport:
    """What the rules of one detection length are worth so far."""

    signals: Mapping[Signal, SignalReport]
    active: ShadowReport
    shadow: ShadowReport
    audit: AuditReport


@dataclass(frozen=True, slots=True)
class HeadInfo:
    """What a quality head is for."""

    detection_length: int
    hidden_size: int
    version: int
    num_steps: int
    """Optimizer steps taken."""
    num_labels: int
    """Labels trained on."""
    adapter: str = BASE_MODEL
    """The LoRA adapter whose candidates it scores; `BASE_MODEL`: none."""

    @property
    def key(self) -> HeadKey:
        return HeadKey(self.detection_length, self.adapter)


def signal_report(predictions: Sequence[Prediction]) -> SignalReport:
    """All measures of one signal."""
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
    """Weighted probability that a positive scores above a negative, ties counting half; None without both labels."""
    below = concordant = positives = 0.0
    for _, tied in groupby(sorted(predictions, key=_score), key=_score):
        here = list(tied)
        positive = fsum(prediction.weight for prediction in here if prediction.positive)
        negative = fsum(prediction.weight for prediction in here if not prediction.positive)
        concordant += positive * (below + negative / 2)
        below += negative
        positives += positive
    return concordant / (positives * below) if positives and below else None


def within_group_auc(predictions: Iterable[Prediction]) -> float | None:
    """The mean AUC over groups with both labels, each group counting once; None when there is no such group."""
    ordered = sorted(predictions, key=_group)
    values = [value for _, group in groupby(ordered, key=_group) if (value := auc(group)) is not None]
    return fsum(values) / len(values) if values else None


def brier(predictions: Iterable[Prediction]) -> float | None:
    """Weighted mean squared error of the success probabilities."""
    calibrated = [(p.weight, (p.success_probability - p.positive) ** 2) for p in _calibrated(predictions)]
    return weighted_mean(calibrated)


def reliability_bins(predictions: Iterable[Prediction], num_bins: int = NUM_RELIABILITY_BINS) -> list[ReliabilityBin]:
    """Predicted against observed success, by predicted success; the last bin includes 1."""
    members: list[list[Prediction]] = [[] for _ in range(num_bins)]
    for prediction in _calibrated(predictions):
        members[min(num_bins - 1, int(prediction.success_probability * num_bins))].append(prediction)
    return [
        ReliabilityBin(
            lower=i / num_bins,
            upper=(i + 1) / num_bins,
            num_labels=len(here),
            mean_predicted=weighted_mean((p.weight, p.success_probability) for p in here),
            mean_observed=weighted_mean((p.weight, float(p.positive)) for p in here),
        )
        for i, here in enumerate(members)
    ]


def weighted_mean(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Of (weight, value) pairs; None without weight."""
    pairs = list(pairs)
    total = fsum(weight for weight, _ in pairs)
    return fsum(weight * value for weight, value in pairs) / total if total else None


def _calibrated(predictions: Iterable[Prediction]) -> list[Prediction]:
    return [prediction for prediction in predictions if prediction.success_probability is not None]


def _score(prediction: Prediction) -> float:
    return prediction.score


def _group(prediction: Prediction) -> str:
    return prediction.group

"""How well scores foretold rewards. Invariant: every score was given before its reward was known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    """Mean squared error of the success probability; None without calibrated scores."""
    bins: Sequence[ReliabilityBin]


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """What pruning did, or in shadow mode would have done, to rewarded candidates."""

    num_scored: int
    num_pruned: int
    """Pruned, or in shadow mode marked."""
    tokens_saved: int
    """In shadow mode: tokens that marked candidates generated after `detection_length`."""
    positive_ratio: float | None
    """Success rate of all rewarded candidates, weighted by 1 / survival probability."""
    survivors_positive_ratio: float | None
    """Success rate of those that were, or would have been, kept."""

"""Values about a scored candidate, from its measurement to its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_rollout.kernel.rules.types import Signal


class Confidence(NamedTuple):
    """Trace confidence of a candidate's first `detection_length` tokens, in nats (DeepConf, ARRoL section 3)."""

    mean: float
    lowest_window: float
    """The lowest mean over any window of consecutive tokens, in nats."""
    bottom_windows: float
    """The mean over the lowest tenth of the windows, in nats."""


@dataclass(frozen=True, slots=True)
class Assessment:
    """Decision on a scored candidate, with the numbers behind it."""

    signal: Signal
    """Signal that was used. `confidence` also replaces a head with too few labels."""
    score: float
    """The head's logit, or the confidence (`bottom_windows`)."""
    success_probability: float | None
    """The calibrated score. None during a cold start, or when no score was a number."""
    survival_probability: float
    """Probability with which the candidate was kept, given the state of its group. 1 during a cold start."""
    keep: bool
    """False: pruned, or in shadow mode marked as prunable."""
    head_version: int
    confidence: Confidence
    cold: bool = False
    """True if there were too few labels to prune by."""


class Scores(NamedTuple):
    """Assessments of a candidate that has ended."""

    assessment: Assessment | None
    """Assessment at the candidate's detection length."""
    final: Assessment | None
    """Assessment at the candidate's last token."""


NO_SCORES = Scores(None, None)


def scores_of(values: Mapping[str, Any]) -> Scores:
    """The scores among values of parts."""
    return next((value for value in values.values() if isinstance(value, Scores)), NO_SCORES)

"""A rewarded candidate, and what rewarded candidates say of signals and of pruning.

Invariant: a report depends on the candidates, the numbers of verdicts and what audits say that it is given, and on
nothing else; so candidates of several ranks are reported together as one rank's are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from vllm_rollout.config import MAX_LABEL_WEIGHT
from vllm_rollout.group.checks import MAX_SCORE, flag, integer, listed, number, shown, text
from vllm_rollout.group.pruning_plan import SIGNALS
from vllm_rollout.group.race_bias import AuditReport
from vllm_rollout.group.report import Prediction, RulesReport, ShadowReport, signal_report, weighted_mean
from vllm_rollout.group.types import Signal

LEAST_SURVIVAL = 1e-9
"""Survival probabilities below are taken as this in the report, whose sums stay finite."""

MAX_GROUP_CHARS = 2**16
"""Longest name of a group in a state."""


class RewardedCandidate(NamedTuple):
    """A rewarded candidate, as the report needs it."""

    scores: Mapping[Signal, float]
    """The head's as its version's scale had it, so that those of several versions can be compared."""
    success_probabilities: Mapping[Signal, float]
    """Before the reward was known; only of signals whose calibration knew enough."""
    positive: bool
    weight: float
    """1 / survival probability, clipped; 1 in shadow mode."""
    group: str
    active: bool
    keep: bool
    survival_probability: float
    cold: bool
    tokens_after: int
    """Tokens generated after `detection_length`."""
    is_sample: bool = False
    """Of a group in which nobody raced."""

    @classmethod
    def from_state(cls, values: Any) -> RewardedCandidate:
        """Raises: ValueError."""
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
    """Numbers by signal, as a state has them. Raises: ValueError."""
    if not isinstance(values, Mapping) or not set(values) <= set(SIGNALS):
        raise ValueError(f"{where}: expected numbers by signal ({', '.join(SIGNALS)}), got {shown(values)}")
    return {signal: number(value, where, least, most) for signal, value in values.items()}


def rules_report(
    outcomes: Iterable[RewardedCandidate], num_judged: int, num_pruned: int, audit: AuditReport
) -> RulesReport:
    """Over the newest rewarded candidates, and the newest verdicts of active pruning.

    Positive labels of races count less, or more, as audits say (`group/race_bias.py`).
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

"""Bias of labels from races against labels from audit groups, and its correction.

Rewards come for candidates that finish first. If wrong answers are longer, they are missing among the labels, by a
factor that races do not show. Audit groups show it (`parts/pruning/rules/audit.py`): their labels are a plain sample.
The factor is one of odds. Let a right answer get a label with probability a, and a wrong one with b. Then the odds of
success among labels are a / b times the odds among all answers:

    logit P(success) = logit P(success | labelled) + intercept.

So labels of races calibrate scores. The few audits fit one number: the intercept with which the table of the races
predicts the labels of audits best (maximum likelihood). Each of these labels is predicted from earlier ones only, so
that an improving policy is not mistaken for a bias. An informative score has a larger intercept than the success rate,
because an average of odds is not the odds of an average. The method assumes that the race depends on scores only
through success. If a score also predicts lengths, the intercept is right on average.

Groups without spare candidates do not race, and their labels are a plain sample. For labels of both kinds the intercept
is multiplied by the share of raced ones.

Invariant: results depend only on the labels and their order. Without audits, or without races, the correction is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import Any, Literal, get_args

from vllm_rollout.checks import listed, number
from vllm_rollout.parts.pruning.rules.logistic import logit

LabelOrigin = Literal["race", "audit", "plain", "plain_audit"]
"""Kind of group that a label comes from.

race         a group with spare candidates, in which slow candidates lose their places
audit        a group that would have raced, but was audited (`parts/pruning/rules/audit.py`)
plain        a group without a race: all survivors of pruning are returned
plain_audit  a group without a race and, by an audit, without pruning
"""
ORIGINS: tuple[LabelOrigin, ...] = get_args(LabelOrigin)
AUDITS: tuple[LabelOrigin, ...] = ("audit", "plain_audit")

HALF_LIFE = 2048
"""Labels of audits after which the weight of a label has halved.

The bias of a race changes more slowly than a success rate. 256 prompts of 8 answers determine a rate of 0.3 to 0.02.
"""
PRIOR_PRECISION = 2.0
"""Precision of an intercept before any audit: about that of ten labels of audits."""
MAX_INTERCEPT = 3.0
"""Largest size of an intercept. Odds that differ by more than a factor of 20 come from very few labels."""
MAX_PRECISION = 1e6

_DECAY = 0.5 ** (1 / HALF_LIFE)


@dataclass(slots=True)
class Intercept:
    """The most likely intercept, updated by one Newton step for each label."""

    value: float = 0.0
    precision: float = PRIOR_PRECISION

    @property
    def is_known(self) -> bool:
        return self.precision > PRIOR_PRECISION

    def learn(self, foretold: float, share: float, positive: bool) -> None:
        """Add a label of an audit. `foretold`: its predicted success probability. `share`: share of raced labels
        behind it."""
        p = 1 / (1 + exp(-logit(foretold) - self.value * share))
        self.precision = max(PRIOR_PRECISION, self.precision * _DECAY) + share * share * p * (1 - p)
        step = share * (positive - p) / self.precision
        self.value = min(MAX_INTERCEPT, max(-MAX_INTERCEPT, self.value + step))

    def to_state(self) -> list[float]:
        return [self.value, self.precision]

    @classmethod
    def from_state(cls, state: Any) -> Intercept:
        """Restore an intercept. Raises: ValueError for a state that no intercept can have."""
        value, precision = listed(state, "an intercept", length=2)
        return cls(
            number(value, "an intercept", -MAX_INTERCEPT, MAX_INTERCEPT),
            number(precision, "precision of an intercept", PRIOR_PRECISION, MAX_PRECISION),
        )


TALLY_HALF_LIFE = 8192
"""Labels, of all kinds, after which the weight of a label in a report has halved."""
MAX_SUM = 1e12

_TALLY_DECAY = 0.5 ** (1 / TALLY_HALF_LIFE)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Statistics of audit groups against other groups."""

    num_labels: float = 0.0
    """Labels of audit groups, weighted. Older ones count less."""
    positive_ratio: float | None = None
    """Success rate in audit groups: that of the policy. None without a label of them."""
    raced_positive_ratio: float | None = None
    """Success rate of other labels, weighted by 1 / survival probability: the estimate without audits."""
    offset: float = 0.0
    """Correction of the logit of a success probability."""
    raced_success_weight: float = 1.0
    """Factor on the weight of a positive label of a race, beside its 1 / survival probability."""


class AuditTally:
    """Decaying sums over labels of audits, and over other labels."""

    def __init__(self) -> None:
        self._sums = [[0.0, 0.0], [0.0, 0.0]]
        """Weights of (negatives, positives): of other labels, then of audits."""

    def add(self, positive: bool, weight: float, origin: LabelOrigin) -> None:
        self._sums = [[total * _TALLY_DECAY for total in sums] for sums in self._sums]
        self._sums[origin in AUDITS][positive] += weight

    def report(self, offset: float, raced_success_weight: float) -> AuditReport:
        others, audits = self._sums
        return AuditReport(sum(audits), _rate(audits), _rate(others), offset, raced_success_weight)

    def to_state(self) -> list[list[float]]:
        return [list(sums) for sums in self._sums]

    @classmethod
    def from_state(cls, state: Any) -> AuditTally:
        """Restore a tally. Raises: ValueError for a state that no tally can have."""
        rows = [listed(row, "a tally of audits", length=2) for row in listed(state, "a tally of audits", length=2)]
        tally = cls()
        tally._sums = [[number(total, "a sum of a tally of audits", 0.0, MAX_SUM) for total in row] for row in rows]
        return tally


def _rate(sums: Sequence[float]) -> float | None:
    return sums[True] / sum(sums) if sum(sums) else None

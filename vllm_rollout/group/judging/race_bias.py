"""How much better the labels of races look than those of audit groups, and what takes that back.

Rewards come for those that finish first. If what is wrong is longer, wrong answers lack among the labels, by a factor
that the race does not tell. Audit groups tell it (`group/judging/audit.py`): their labels are a plain sample. The
factor is one of odds: let a right answer be labelled with probability a and a wrong one with b. Then among labels the
odds of success are a / b times what they are among all answers, and

    logit P(success) = logit P(success | labelled) + intercept.

So labels of races teach what a score is worth, and audits, few as they are, one number: the intercept by which what
races have taught foretells the labels of audits best (maximum likelihood). Each of these is foretold by what was known
when it came, so that a policy that gets better is not taken for a bias. The intercept of a score that knows more is
larger than that of the success rate, which is one as well: an average of odds is not the odds of an average. That
success and length say all that the race goes by is an assumption: where a score tells of lengths beyond success, the
intercept is right on average.

Where a group has no spare candidates nobody races, and its labels are a plain sample as they are. Of labels of both
kinds the intercept is needed in the share that is raced.

Invariant: what is said depends on the labels and their order only; without audits, or without races, it is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import Any, Literal, get_args

from vllm_rollout.group.checks import listed, number
from vllm_rollout.group.judging.logistic import logit

LabelOrigin = Literal["race", "audit", "plain", "plain_audit"]
"""The kind of group that a label is of.

race         it has spare candidates: others lose their places to those that are faster
audit        it would have raced, and does not (`group/judging/audit.py`)
plain        nobody would race: all who survive are returned
plain_audit  nobody would race, and nobody is pruned either
"""
ORIGINS: tuple[LabelOrigin, ...] = get_args(LabelOrigin)
AUDITS: tuple[LabelOrigin, ...] = ("audit", "plain_audit")

HALF_LIFE = 2048
"""Labels of audits after which one counts half: a race favours the same kind of answer for longer than a success rate
lasts, and 256 prompts of 8 answers tell a rate of 0.3 to 0.02."""
PRIOR_PRECISION = 2.0
"""Precision of an intercept before there are audits: about what ten of their labels tell."""
MAX_INTERCEPT = 3.0
"""Odds that differ by more than a factor of 20 come from a handful of labels."""
MAX_PRECISION = 1e6

_DECAY = 0.5 ** (1 / HALF_LIFE)


@dataclass(slots=True)
class Intercept:
    """The most likely one, found label by label: each moves it by a step of Newton's."""

    value: float = 0.0
    precision: float = PRIOR_PRECISION

    @property
    def is_known(self) -> bool:
        return self.precision > PRIOR_PRECISION

    def learn(self, foretold: float, share: float, positive: bool) -> None:
        """A label of an audit. `foretold`: its probability of success by a table of which `share` is raced."""
        p = 1 / (1 + exp(-logit(foretold) - self.value * share))
        self.precision = max(PRIOR_PRECISION, self.precision * _DECAY) + share * share * p * (1 - p)
        step = share * (positive - p) / self.precision
        self.value = min(MAX_INTERCEPT, max(-MAX_INTERCEPT, self.value + step))

    def to_state(self) -> list[float]:
        return [self.value, self.precision]

    @classmethod
    def from_state(cls, state: Any) -> Intercept:
        """Raises: ValueError."""
        value, precision = listed(state, "an intercept", length=2)
        return cls(
            number(value, "an intercept", -MAX_INTERCEPT, MAX_INTERCEPT),
            number(precision, "precision of an intercept", PRIOR_PRECISION, MAX_PRECISION),
        )


TALLY_HALF_LIFE = 8192
"""Labels, of all kinds, after which one counts half in a report."""
MAX_SUM = 1e12

_TALLY_DECAY = 0.5 ** (1 / TALLY_HALF_LIFE)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What audit groups say of the others."""

    num_labels: float = 0.0
    """Labels of audit groups; older ones count less."""
    positive_ratio: float | None = None
    """Success rate in audit groups: that of the policy. None without a label of them."""
    raced_positive_ratio: float | None = None
    """Success rate of other labels, weighted by 1 / survival probability: as it would be believed without audits."""
    offset: float = 0.0
    """The correction of the logit of a success probability."""
    raced_success_weight: float = 1.0
    """Answers that a success of a race stands for in a success rate, beside what its survival says."""


class AuditTally:
    """Decaying sums over labels, of audits and of the others."""

    def __init__(self) -> None:
        self._sums = [[0.0, 0.0], [0.0, 0.0]]
        """Weights of negatives and positives: others', audits'."""

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
        """Raises: ValueError."""
        rows = [listed(row, "a tally of audits", length=2) for row in listed(state, "a tally of audits", length=2)]
        tally = cls()
        tally._sums = [[number(total, "a sum of a tally of audits", 0.0, MAX_SUM) for total in row] for row in rows]
        return tally


def _rate(sums: Sequence[float]) -> float | None:
    return sums[True] / sum(sums) if sum(sums) else None

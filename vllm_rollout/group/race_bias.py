"""How much better the labels of races look than those of audit groups, and what takes that back.

Rewards come for those that finish first. If what is wrong is longer, wrong answers lack among the labels, by a factor
that the race does not tell. Audit groups tell it (`group/audit.py`): their labels are a plain sample. The factor is one
of odds: let a right answer be labelled with probability a and a wrong one with b, whatever its score. Then among labels
the odds of success, at any score, are a / b times what they are among all answers, and

    logit P(success) = logit P(success | labelled) + offset,   offset = logit(rate in audits) - logit(rate of labels).

So labels of races teach what a score is worth, and audits, few as they are, one number. That success and length say all
that the race goes by is an assumption: where a score tells of lengths beyond success, a part of the bias stays.

The offset is taken over many more labels than a calibration's window has, since a race favours the same kind of answer
for longer than a success rate lasts. Of few audits it is shrunk toward 0.

Invariant: what is said depends on the labels and their order only; without audits the offset is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

from vllm_rollout.group.checks import listed, number

HALF_LIFE = 8192
"""Labels after which a label counts half: some 600 labels of audits at a twentieth, by which a success rate of 0.3 is
known to 0.02."""
SHRINKAGE = 16.0
"""Made-up audits that say there is no bias."""
MAX_OFFSET = 3.0
"""Odds that differ by more than a factor of 20 come from a handful of labels."""
MAX_SUM = 1e12

_DECAY = 0.5 ** (1 / HALF_LIFE)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What audit groups say of the others."""

    num_labels: float
    """Of audit groups; older ones count less."""
    positive_ratio: float | None
    """Success rate in audit groups: that of the policy. None without a label of them."""
    raced_positive_ratio: float | None
    """Success rate of other labels, weighted by 1 / survival probability: as it would be believed without audits."""
    offset: float
    """By which the logit of a success probability is corrected."""


class RaceBias:
    """Decaying sums over labels."""

    def __init__(self, audit: Sequence[float] = (0.0, 0.0), raced: Sequence[float] = (0.0, 0.0)) -> None:
        self._audit = list(audit)
        """Weights of negatives and positives."""
        self._raced = list(raced)

    def add(self, positive: bool, weight: float, *, audit: bool) -> None:
        for sums in (self._audit, self._raced):
            sums[:] = (total * _DECAY for total in sums)
        (self._audit if audit else self._raced)[positive] += weight

    @property
    def offset(self) -> float:
        """For probabilities that labels of both kinds have taught."""
        return self._offset([a + r for a, r in zip(self._audit, self._raced, strict=True)])

    @property
    def raced_offset(self) -> float:
        """For probabilities that labels of races alone have taught."""
        return self._offset(self._raced)

    @property
    def raced_success_share(self) -> float:
        """Answers that a success of a race stands for, beside what its weight says: sums over labels then stand for
        all answers."""
        return exp(self.raced_offset)

    def report(self) -> AuditReport:
        return AuditReport(sum(self._audit), _rate(self._audit), _rate(self._raced), self.offset)

    def to_state(self) -> list[list[float]]:
        return [list(self._audit), list(self._raced)]

    @classmethod
    def from_state(cls, state: Any) -> RaceBias:
        """Raises: ValueError."""
        rows = [listed(row, "a race bias", length=2) for row in listed(state, "a race bias", length=2)]
        return cls(*([number(total, "a sum of a race bias", 0.0, MAX_SUM) for total in row] for row in rows))

    def _offset(self, taught: Sequence[float]) -> float:
        num_audits, num_taught = sum(self._audit), sum(taught)
        if not num_audits or not num_taught:
            return 0.0
        # Half a label of either kind keeps the logits finite, and takes most of the bias out of their estimate.
        of_audits, of_taught = (log((sums[1] + 0.5) / (sums[0] + 0.5)) for sums in (self._audit, taught))
        offset = (of_audits - of_taught) * num_audits / (num_audits + SHRINKAGE)
        return min(MAX_OFFSET, max(-MAX_OFFSET, offset))


NO_BIAS: Mapping[str, Any] = {"race_bias": RaceBias().to_state()}
"""What states of earlier versions lack."""


def _rate(sums: Sequence[float]) -> float | None:
    return sums[True] / sum(sums) if sum(sums) else None

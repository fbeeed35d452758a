"""How much better the labels of races look than those of audit groups, and what takes that back.

Rewards come for those that finish first. If what is wrong is longer, wrong answers lack among the labels, by a factor
that the race does not tell. Audit groups tell it (`group/audit.py`): their labels are a plain sample. The factor is one
of odds: let a right answer be labelled with probability a and a wrong one with b, whatever its score. Then among labels
the odds of success, at any score, are a / b times what they are among all answers, and

    logit P(success) = logit P(success | labelled) + offset,   offset = logit(rate in audits) - logit(rate of labels).

So labels of races teach what a score is worth, and audits, few as they are, one number. That success and length say all
that the race goes by is an assumption: where a score tells of lengths beyond success, a part of the bias stays.

Where a group has no spare candidates nobody races, and its labels are a plain sample as they are. They need no offset,
and audits are compared with races only: beside plain labels the chance in a few audits would be taken for a bias.

The offset is taken over many more labels than a calibration's window has, since a race favours the same kind of answer
for longer than a success rate lasts. Of few audits it is shrunk toward 0.

Invariant: what is said depends on the labels and their order only; without audits, or without races, the offset is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, log
from types import MappingProxyType
from typing import Any, Literal

from vllm_rollout.group.checks import listed, number

LabelOrigin = Literal["race", "audit", "plain", "plain_audit"]
"""Of which kind of group a label is.

race         it has spare candidates: others lose their places to those that are faster
audit        it would have raced, and does not (`group/audit.py`)
plain        nobody would race: all who survive are returned
plain_audit  nobody would race, and nobody is pruned either
"""
ORIGINS: tuple[LabelOrigin, ...] = ("audit", "race", "plain", "plain_audit")
"""In the order of a state's rows."""

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

    def __init__(self, sums: Mapping[LabelOrigin, Sequence[float]] = MappingProxyType({})) -> None:
        self._sums: dict[LabelOrigin, list[float]] = {origin: list(sums.get(origin, (0.0, 0.0))) for origin in ORIGINS}
        """Weights of negatives and positives."""

    def add(self, positive: bool, weight: float, origin: LabelOrigin) -> None:
        for sums in self._sums.values():
            sums[:] = (total * _DECAY for total in sums)
        self._sums[origin][positive] += weight

    @property
    def offset(self) -> float:
        """For probabilities that labels of all kinds have taught."""
        taught = self._together(*ORIGINS)
        extra = self._sums["race"][True] * (self.raced_success_share - 1)
        return _logit([taught[False], taught[True] + extra]) - _logit(taught)

    @property
    def raced_offset(self) -> float:
        """For probabilities that labels of races alone have taught."""
        audit, raced = self._sums["audit"], self._sums["race"]
        num_audits = sum(audit)
        if not num_audits or not sum(raced):
            return 0.0
        offset = (_logit(audit) - _logit(raced)) * num_audits / (num_audits + SHRINKAGE)
        return min(MAX_OFFSET, max(-MAX_OFFSET, offset))

    @property
    def raced_success_share(self) -> float:
        """Answers that a success of a race stands for, beside what its weight says: sums over labels then stand for
        all answers."""
        return exp(self.raced_offset)

    def report(self) -> AuditReport:
        audit, others = self._together("audit", "plain_audit"), self._together("race", "plain")
        return AuditReport(sum(audit), _rate(audit), _rate(others), self.offset)

    def to_state(self) -> list[list[float]]:
        return [list(self._sums[origin]) for origin in ORIGINS]

    @classmethod
    def from_state(cls, state: Any) -> RaceBias:
        """Raises: ValueError."""
        if isinstance(state, list) and len(state) == 2:
            state = [*state, [0.0, 0.0], [0.0, 0.0]]  # of versions that took plain labels for those of races
        rows = [listed(row, "a race bias", length=2) for row in listed(state, "a race bias", length=len(ORIGINS))]
        sums = [[number(total, "a sum of a race bias", 0.0, MAX_SUM) for total in row] for row in rows]
        return cls(dict(zip(ORIGINS, sums, strict=True)))

    def _together(self, *origins: LabelOrigin) -> list[float]:
        """Weights of negatives and positives."""
        return [fsum(self._sums[origin][positive] for origin in origins) for positive in (False, True)]


NO_BIAS: Mapping[str, Any] = {"race_bias": RaceBias().to_state()}
"""What states of earlier versions lack."""


def _logit(sums: Sequence[float]) -> float:
    """Half a label of either kind keeps it finite, and takes most of the bias out of its estimate."""
    return log((sums[True] + 0.5) / (sums[False] + 0.5))


def _rate(sums: Sequence[float]) -> float | None:
    return sums[True] / sum(sums) if sum(sums) else None

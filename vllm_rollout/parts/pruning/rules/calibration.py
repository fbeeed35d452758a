"""Calibrates scores to success probabilities, from rewards (ARRoL A.4, Eq. 1, with measured errors corrected).

A score is mapped to s' in [0, 1] by the scale of its head's version (`scale.py`) and falls into one of B uniform bins.
Labels of both kinds are counted in the bins, and `success_bins.py` turns the counts into probabilities. A.4 itself, a
logit's sigmoid and Laplace's smoothing, is kept as `method="paper"` for comparison.

A label keeps the scale of the version that gave its score, and so do recent scores. If a head is trained or replaced,
the calibration therefore holds for its new scores at once.

Labels of audits (`race_bias.py`) do not enter a table that contains labels of races. Instead they fit the intercept
that corrects it. Until labels of races are as many as those of audits, labels of audits enter the table as plain ones.

Labels exist only for survivors. A label of a candidate that was kept with probability p stands for 1 / p candidates, so
counts are weighted by 1 / p. Sums over survivors then estimate sums over all candidates. (A selection by one score
alone does not change P(success | that score). The weights are needed for the success rate and for another signal's
calibration, and if siblings or older versions took part in the selection.)

Invariant: answers depend only on the contents of the windows, the scales, the intercept, and whether there were enough
labels. A table does not depend on the order in which labels came or went. A restored calibrator answers as the saved
one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from math import isfinite
from typing import Any, Literal, get_args

from vllm_rollout.checks import MAX_SCORE, fields_of, flag, integer, listed, number, shown
from vllm_rollout.config import CALIBRATION_WINDOW
from vllm_rollout.kernel.rules.types import Signal
from vllm_rollout.parts.pruning.rules.logistic import shifted
from vllm_rollout.parts.pruning.rules.race_bias import AUDITS, ORIGINS, Intercept, LabelOrigin
from vllm_rollout.parts.pruning.rules.scale import REMEMBERED_VERSIONS, Scale, Scales
from vllm_rollout.parts.pruning.rules.success_bins import combined_table, paper_table

CALIBRATION_BINS = 128
"""Bins of a score's calibration, B of ARRoL A.4."""
CALIBRATION_SPREAD = 7
"""Bins on either side in which a label counts too, by 7/8 to 1/8. 0 is the paper's calibration. Measured:
docs/development/log.md."""
CALIBRATION_SMOOTHING = 1.0
"""Laplace smoothing per bin and label, of the paper's method."""
RECENT_SCORES = 1024
"""Newest scored candidates, with or without a label, over which mean survival equals `keep_ratio`.

Small enough to follow a head in training. The ratio's own error is below 2 %.
"""
MIN_RECENT_LABELS = 8
"""Fewest labels of each kind in the window for which labels that have left it still count."""

WEIGHT_STEP = 2.0**-16
"""Unit of weights. Sums of integers are exact, so that the removal of a label undoes its addition."""

MAX_WEIGHT = 2.0**32
"""Upper bound of weights, exclusive."""

Method = Literal["combined", "paper"]


@dataclass(slots=True, eq=False)
class _Score:
    value: float
    scale: Scale
    bin: int


@dataclass(slots=True, eq=False)
class _Label(_Score):
    positive: bool
    weight: int
    """Weight of the label, in steps of `WEIGHT_STEP`."""
    origin: LabelOrigin


class Calibrator:
    """One signal's calibration, over sliding windows.

    One window holds both kinds of labels. ARRoL has a buffer for each. The prior taken from two full buffers would be
    1/2 at any success rate. A second window holds recent scores with and without a label, pruned candidates included.
    Survival rules are solved on that distribution.
    """

    def __init__(
        self,
        signal: Signal = "head",
        num_bins: int = CALIBRATION_BINS,
        window: int = CALIBRATION_WINDOW,
        num_recent: int = RECENT_SCORES,
        spread: int = CALIBRATION_SPREAD,
        method: Method = "combined",
    ) -> None:
        self.signal: Signal = signal
        self.num_positive = 0
        """Positive labels in the window, unweighted."""
        self.num_changes = 0
        """Version of the answers: grows with every change that may change one. A key for caches."""
        self._num_bins = num_bins
        self._window = window
        self._num_recent = num_recent
        self._spread = spread
        self._method = method
        self._labels: deque[_Label] = deque()
        self._counts: tuple[list[int], list[int]] = ([0] * num_bins, [0] * num_bins)
        """Weighted negatives and positives per bin, in steps of weight."""
        self._squares = 0
        """Sum of the squares of all weights."""
        self._raced = 0
        """Weight of labels of races, in steps."""
        self._num_audits = [0, 0]
        """Negatives and positives of audits in the window."""
        self.intercept = Intercept()
        """Correction of a table from labels of races, as an intercept of logits."""
        self.rate_intercept = Intercept()
        """Correction of the success rate among labels of races, as an intercept of logits."""
        self._num_seen = [0, 0]
        """Negatives and positives, also those that have left the window. See `is_warm`."""
        self._recent: deque[_Score] = deque()
        self._recent_counts = [0] * num_bins
        self._scales = Scales()
        self._uncorrected: tuple[float, ...] | None = None
        self._table: tuple[float, ...] | None = None

    @property
    def offset(self) -> float:
        """Correction of the logits of the uncorrected table."""
        return self.intercept.value * self._raced_share

    def begin_intercept(self, value: float) -> None:
        """Start with another signal's intercept, as long as there are no audits for this signal."""
        if not self.intercept.is_known and value != self.intercept.value:
            self.intercept = Intercept(value)
            self._change()

    @property
    def num_negative(self) -> int:
        """Negative labels in the window, unweighted."""
        return len(self._labels) - self.num_positive

    def is_warm(self, min_labels: int) -> bool:
        """True if there were at least `min_labels` labels of each kind.

        Labels that have left the window count too, because success may be rare. If the window has fewer than
        `MIN_RECENT_LABELS` of either kind, only labels in the window count, and the count starts again from there.
        """
        return min(self._num_seen) >= min_labels

    def standardize(self, score: float, version: int) -> float:
        """The score on a scale that is comparable between versions."""
        return self._scales.of(version).standardize(score)

    def begin_version(self, version: int) -> None:
        """Start a version of the head. Call it also for another head with an earlier version number."""
        self._scales.begin(version)

    def observe(self, score: float, version: int = 0) -> None:
        """Add the score of a candidate, with or without a later reward."""
        _check(score)
        scale = self._scales.for_score(version)
        recent = _Score(score, scale, self._bin(score, scale))
        self._recent.append(recent)
        self._recent_counts[recent.bin] += 1
        if len(self._recent) > self._num_recent:
            self._recent_counts[self._recent.popleft().bin] -= 1
        self.num_changes += 1
        scale.num_scores += 1
        scale.num_new += 1
        # The paper uses a head's logits unchanged, and has no scores without such a scale.
        keeps_scale = self._method == "paper" and self.signal == "head"
        if scale.is_due(self._num_recent) and not keeps_scale:
            self._follow(scale)

    def add(
        self,
        score: float,
        positive: bool,
        weight: float = 1.0,
        version: int = 0,
        origin: LabelOrigin = "plain",
    ) -> None:
        """Add a label: the reward of a scored candidate. `weight`: 1 / survival probability, clipped by the caller.

        Raises: ValueError for a score that is not finite, or a weight outside (0, `MAX_WEIGHT`).
        """
        _check(score)
        if not 0 < weight < MAX_WEIGHT:
            raise ValueError(f"weight must be in (0, 2**32), got {weight}")
        label = self._label(score, positive, weight, self._scales.for_label(version), origin)
        if origin in AUDITS and self._foretells_audits:
            self._learn_bias(label)
            return
        self._append(label)
        if any(self._num_audits) and self._foretells_audits:
            self._take_audits_out()

    def success_probability(self, score: float, version: int | None = None) -> float:
        """Success probability of the score's bin."""
        return self.table()[self._bin(score, self._scales.of(version))]

    def table(self) -> tuple[float, ...]:
        """Success probability of each bin [num_bins]."""
        if self._table is None:
            table, offset = self._taught_table(), self.offset
            self._table = tuple(shifted(q, offset) for q in table) if offset else table
        return self._table

    def _taught_table(self) -> tuple[float, ...]:
        """Success probability of each bin [num_bins], without the intercept."""
        if self._uncorrected is None:
            total = self._total
            if self._method == "paper":
                negatives, positives = ([count * WEIGHT_STEP for count in counts] for counts in self._counts)
                self._uncorrected = paper_table(negatives, positives, self._spread, CALIBRATION_SMOOTHING)
            else:
                labels = total / self._squares if total else 0.0  # so many labels is a weight worth (Kish)
                negatives, positives = ([count * labels for count in counts] for counts in self._counts)
                self._uncorrected = combined_table(negatives, positives, self._spread)
        return self._uncorrected

    def points(self) -> list[tuple[float, float]]:
        """(success probability, number of recent scores) of every bin with recent scores."""
        return [(q, float(n)) for q, n in zip(self.table(), self._recent_counts, strict=True) if n]

    def labelled_points(self, num: int) -> list[tuple[float, float]]:
        """(success probability, weight) of the newest labels, at most `num`."""
        table = self.table()
        return [(table[label.bin], label.weight * WEIGHT_STEP) for label in islice(reversed(self._labels), num)]

    def to_state(self) -> dict[str, Any]:
        """JSON-able state, bounded by the windows. The caller owns its lists. Their entries never change."""
        scales = dict.fromkeys([*self._scales, *(each.scale for each in (*self._labels, *self._recent))])
        numbers = {scale: number for number, scale in enumerate(scales)}
        return {
            "signal": self.signal,
            "labels": [
                (label.value, label.positive, label.weight * WEIGHT_STEP, numbers[label.scale], label.origin)
                for label in self._labels
            ],
            "recent": [(recent.value, numbers[recent.scale]) for recent in self._recent],
            "scales": [scale.to_state() for scale in scales],
            "num_versions": len(self._scales),
            "present": numbers[self._scales.present],
            "num_seen": list(self._num_seen),
            "intercepts": [self.intercept.to_state(), self.rate_intercept.to_state()],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], **sizes: Any) -> Calibrator:
        """Restore a calibrator. `sizes`: arguments of the constructor. Smaller windows than the saved ones keep the
        newest.

        Raises: ValueError for a state that `to_state` cannot have written.
        """
        state = fields_of(state, STATE_FIELDS, "a calibrator")
        if state["signal"] not in get_args(Signal):
            raise ValueError(f"signal of a calibrator must be one of {get_args(Signal)}, got {state['signal']!r:.40}")
        calibrator = cls(state["signal"], **sizes)
        rows = listed(state["scales"], "scales of a calibrator", MAX_SCALES)
        scales = [Scale.from_state(row) for row in rows]
        num_versions = integer(state["num_versions"], "num_versions of a calibrator", 1, len(scales))
        present = integer(state["present"], "present scale of a calibrator", 0, num_versions - 1)
        calibrator._scales = Scales.restored(scales[:num_versions], scales[present])
        last = len(scales) - 1
        for label in listed(state["labels"], "labels of a calibrator", CALIBRATION_WINDOW):
            score, positive, weight, scale, origin = listed(label, "a label of a calibrator", length=5)
            if origin not in ORIGINS:
                raise ValueError(f"origin of a label must be one of {', '.join(ORIGINS)}, got {shown(origin)}")
            calibrator._append(
                calibrator._label(
                    number(score, "score of a label", -MAX_SCORE, MAX_SCORE),
                    flag(positive, "a label's success"),
                    number(weight, "weight of a label", 0.0, MAX_WEIGHT / 2, above=True),
                    scales[integer(scale, "scale of a label", 0, last)],
                    origin,
                )
            )
        recent = listed(state["recent"], "recent scores of a calibrator", RECENT_SCORES)
        for row in recent[max(0, len(recent) - calibrator._num_recent) :]:
            value, place = listed(row, "a recent score of a calibrator", length=2)
            scale = scales[integer(place, "scale of a recent score", 0, last)]
            score = number(value, "a recent score", -MAX_SCORE, MAX_SCORE)
            calibrator._recent.append(_Score(score, scale, calibrator._bin(score, scale)))
            calibrator._recent_counts[calibrator._recent[-1].bin] += 1
        seen = listed(state["num_seen"], "num_seen of a calibrator", length=2)
        calibrator._see([integer(count, "num_seen of a calibrator") for count in seen])
        intercepts = listed(state["intercepts"], "intercepts of a calibrator", length=2)
        calibrator.intercept, calibrator.rate_intercept = map(Intercept.from_state, intercepts)
        return calibrator

    def _bin(self, score: float, scale: Scale) -> int:
        return min(self._num_bins - 1, int(self._num_bins * scale.normalize(score)))

    def _label(self, score: float, positive: bool, weight: float, scale: Scale, origin: LabelOrigin) -> _Label:
        steps = max(1, round(weight / WEIGHT_STEP))
        return _Label(score, scale, self._bin(score, scale), bool(positive), steps, origin)

    def _append(self, label: _Label) -> None:
        self._labels.append(label)
        self._count(label, +1)
        if len(self._labels) > self._window:
            self._count(self._labels.popleft(), -1)
        self._num_seen[label.positive] += 1
        self._see(self._num_seen)

    @property
    def _total(self) -> int:
        return sum(self._counts[False]) + sum(self._counts[True])

    @property
    def _raced_share(self) -> float:
        """Share of labels of races in the weight of the table."""
        return self._raced / self._total if self._raced else 0.0

    @property
    def _foretells_audits(self) -> bool:
        """True if there are enough labels of races and plain ones for a table without audits: as many as those of
        audits."""
        negative, positive = self.num_negative - self._num_audits[False], self.num_positive - self._num_audits[True]
        enough = min(negative, positive) >= MIN_RECENT_LABELS and negative + positive >= sum(self._num_audits)
        return bool(self._raced) and enough

    def _take_audits_out(self) -> None:
        """Remove the labels of audits from the table, and fit the intercepts with them."""
        audits = [label for label in self._labels if label.origin in AUDITS]
        self._labels = deque(label for label in self._labels if label.origin not in AUDITS)
        for label in audits:
            self._count(label, -1)
        for label in audits:
            self._learn_bias(label)

    def _learn_bias(self, label: _Label) -> None:
        share, rate = self._raced_share, sum(self._counts[True]) / self._total
        self.intercept.learn(self._taught_table()[label.bin], share, label.positive)
        self.rate_intercept.learn(rate, share, label.positive)
        self._change()

    def _change(self) -> None:
        """Invalidate the table and the caches."""
        self._table = None
        self.num_changes += 1

    def _see(self, num_seen: list[int]) -> None:
        recent = [self.num_negative, self.num_positive]
        if min(recent) >= MIN_RECENT_LABELS:
            recent = [max(both) for both in zip(recent, num_seen, strict=True)]
        self._num_seen = recent

    def _count(self, label: _Label, sign: int) -> None:
        self._counts[label.positive][label.bin] += sign * label.weight
        self._squares += sign * label.weight * label.weight
        self.num_positive += sign * label.positive
        label.scale.num_labels += sign
        if label.origin == "race":
            self._raced += sign * label.weight
        elif label.origin in AUDITS:
            self._num_audits[label.positive] += sign
        self._uncorrected = None
        self._change()

    def _follow(self, scale: Scale) -> None:
        """Update the present scale, and move its scores and labels to their new bins."""
        newest = list(takewhile(lambda recent: recent.scale is scale, reversed(self._recent)))
        if not scale.follow([recent.value for recent in newest]):
            return
        for recent in newest:
            self._recent_counts[recent.bin] -= 1
            recent.bin = self._bin(recent.value, scale)
            self._recent_counts[recent.bin] += 1
        if scale.num_labels:
            for label in self._labels:
                if label.scale is scale:
                    counts = self._counts[label.positive]
                    counts[label.bin] -= label.weight
                    label.bin = self._bin(label.value, scale)
                    counts[label.bin] += label.weight
            self._uncorrected = self._table = None


STATE_FIELDS = ("signal", "labels", "recent", "scales", "num_versions", "present", "num_seen", "intercepts")

MAX_SCALES = REMEMBERED_VERSIONS + CALIBRATION_WINDOW + RECENT_SCORES


def _check(score: float) -> None:
    if not isfinite(score):
        raise ValueError(f"a score must be a finite number, got {score}")

"""Scores -> success probabilities, learned from rewards (ARRoL A.4, Eq. 1).

A score is brought to s' in [0, 1] and falls into one of B uniform bins. Counts of both labels per bin, smoothed after
Laplace, are the likelihoods; Bayes' rule with the prior of the same counts gives q(s'), the success probability.

128 bins and a few hundred labels make a noisy estimate, so ours differs from A.4 in one thing: a label counts fully in
its own bin and less and less in the next `CALIBRATION_SPREAD` on either side (a triangle). With 512 labels, half of
them positive, the error of q falls from 0.19 to 0.06 (benchmarks/pruning_rules.py); `spread=0` is A.4 as printed.

Labels exist only for survivors. A label of a candidate that was kept with probability p stands for 1 / p candidates, so
counts, likelihoods and prior are weighted by 1 / p: sums over survivors then estimate sums over all candidates. (What
was selected by a score alone still shows P(success | that score) unweighted; the success rate, another signal's
calibration, and that of a score whose siblings or older versions took part in the selection, do need the weights.)

Invariant: what the calibrator says depends on the values in its windows only, not on the order of additions and
evictions, so a restored calibrator answers as the saved one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import exp, fsum, isfinite, sqrt
from typing import Any, NamedTuple, get_args

from vllm_rollout.config import CALIBRATION_WINDOW
from vllm_rollout.group.checks import MAX_COUNT, MAX_SCORE, fields_of, flag, integer, listed, number
from vllm_rollout.group.types import Signal

CALIBRATION_BINS = 128
"""Bins of a score's calibration, B of ARRoL A.4."""
CALIBRATION_SPREAD = 7
"""Bins on either side in which a label counts too, 7/8 to 1/8 of it; 0 is the paper's calibration. One less than a
power of two, so that counts are exact. Measured in benchmarks/pruning_rules.py."""
CALIBRATION_SMOOTHING = 1.0
"""Laplace smoothing per bin and label."""
RECENT_SCORES = 1024
"""Newest scored candidates, with or without a label, over which mean survival equals `keep_ratio`.
Small enough to follow a head that learns; the ratio's own error is below 2 %."""

WEIGHT_STEP = 2.0**-16
"""Weights are rounded to this. Sums of such floats are exact, also of their eighths: taking a label out undoes putting
it in."""

MAX_WEIGHT = 2.0**32
"""Weights are smaller."""

SCALE_DRIFT = 0.25
"""Share of its width by which the scale of confidences may be off before all windows are binned anew."""


class LabelledScore(NamedTuple):
    score: float
    positive: bool
    weight: float


class Calibrator:
    """One signal's calibration, over sliding windows.

    One window holds both labels. With a window for each, as ARRoL's two buffers are, the prior taken from them would be
    1/2 as soon as both were full, whatever the success rate. A second window holds recent scores with and without a
    label, pruned candidates included: the distribution that survival rules are solved on.
    """

    def __init__(
        self,
        signal: Signal = "head",
        num_bins: int = CALIBRATION_BINS,
        window: int = CALIBRATION_WINDOW,
        smoothing: float = CALIBRATION_SMOOTHING,
        num_recent: int = RECENT_SCORES,
        spread: int = CALIBRATION_SPREAD,
    ) -> None:
        assert smoothing > 0, "an empty bin has no probability without smoothing"
        self.signal: Signal = signal
        self.num_positive = 0
        """Positive labels in the window, unweighted."""
        self.num_changes = 0
        """Grows with everything that can change an answer: a key for caches."""
        self._num_bins = num_bins
        self._window = window
        self._smoothing = smoothing
        self._num_recent = num_recent
        shares = [(k, 1 - abs(k) / (spread + 1)) for k in range(-spread, spread + 1)]
        self._neighbours = [[(b + k, x) for k, x in shares if 0 <= b + k < num_bins] for b in range(num_bins)]
        """Per bin: the bins that count in it, and their shares."""
        self._reach = [sum(x for _, x in neighbours) for neighbours in self._neighbours]
        """Per bin: in how many bins its labels count, in all."""
        self._labels: deque[LabelledScore] = deque()
        self._counts: tuple[list[float], list[float]] = ([0.0] * num_bins, [0.0] * num_bins)
        """Weighted negatives and positives per bin."""
        self._totals = [0.0, 0.0]
        self._spread_totals = [0.0, 0.0]
        """Sums over bins of what counts in them."""
        self._recent: deque[float] = deque()
        self._recent_counts = [0] * num_bins
        self._center, self._width = 0.0, 1.0
        self._num_since_scale = 0
        self._table: tuple[float, ...] | None = None

    @property
    def num_negative(self) -> int:
        """Negative labels in the window, unweighted."""
        return len(self._labels) - self.num_positive

    def normalize(self, score: float) -> float:
        """The score as s' in [0, 1].

        A head's logit by the sigmoid, as in the paper. Confidence has no scale of its own (it depends on vocabulary,
        temperature and task), so it is standardised first, by mean and standard deviation of the recent scores. When
        these have drifted, all windows are binned anew. Any monotone map would do: calibration undoes it.
        """
        x = (score - self._center) / self._width
        if x >= 0:
            return 1 / (1 + exp(-x))
        e = exp(max(x, -700.0))
        return e / (1 + e)

    def observe(self, score: float) -> None:
        """A candidate was scored, whether or not its reward will ever be known."""
        _check(score)
        self._recent.append(score)
        self._recent_counts[self._bin(score)] += 1
        if len(self._recent) > self._num_recent:
            self._recent_counts[self._bin(self._recent.popleft())] -= 1
        self.num_changes += 1
        self._num_since_scale += 1
        if self.signal == "confidence" and self._num_since_scale * 2 >= len(self._recent):
            self._rescale()

    def add(self, score: float, positive: bool, weight: float = 1.0) -> None:
        """The reward of a scored candidate came. `weight` is 1 / survival probability, clipped by the caller."""
        _check(score)
        if not 0 < weight < MAX_WEIGHT:
            raise ValueError(f"weight must be in (0, 2**32), got {weight}")
        label = LabelledScore(score, bool(positive), max(1, round(weight / WEIGHT_STEP)) * WEIGHT_STEP)
        self._labels.append(label)
        self._count(label, +1)
        if len(self._labels) > self._window:
            self._count(self._labels.popleft(), -1)
        self.num_changes += 1

    def success_probability(self, score: float) -> float:
        """q of the score's bin."""
        b = self._bin(score)
        return self._success(b) if self._table is None else self._table[b]

    def table(self) -> tuple[float, ...]:
        """q per bin."""
        if self._table is None:
            self._table = tuple(map(self._success, range(self._num_bins)))
        return self._table

    def points(self) -> list[tuple[float, float]]:
        """(q, number of recent scores) of every bin that has recent scores."""
        return [(q, float(n)) for q, n in zip(self.table(), self._recent_counts, strict=True) if n]

    def to_state(self) -> dict[str, Any]:
        """JSON-able; bounded by the windows. Its lists are the caller's, their entries never change."""
        return {
            "signal": self.signal,
            "labels": list(self._labels),
            "recent": list(self._recent),
            "scale": [self._center, self._width],
            "num_since_scale": min(self._num_since_scale, MAX_COUNT),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], **sizes: Any) -> Calibrator:
        """`sizes` are the constructor's; smaller windows than the saved ones keep the newest.

        Raises: ValueError for what `to_state` cannot have written.
        """
        fields_of(state, STATE_FIELDS, "a calibrator")
        if state["signal"] not in get_args(Signal):
            raise ValueError(f"signal of a calibrator must be one of {get_args(Signal)}, got {state['signal']!r:.40}")
        calibrator = cls(state["signal"], **sizes)
        center, width = listed(state["scale"], "scale of a calibrator", length=2)
        center = number(center, "scale of a calibrator (center)", -MAX_SCORE, MAX_SCORE)
        width = number(width, "scale of a calibrator (width)", 0.0, MAX_SCORE, above=True)
        if calibrator.signal == "head" and (center, width) != (0.0, 1.0):
            raise ValueError(f"scale of the head's calibrator must be [0, 1], got [{center}, {width}]")
        calibrator._center, calibrator._width = center, width
        for label in listed(state["labels"], "labels of a calibrator", CALIBRATION_WINDOW):
            score, positive, weight = listed(label, "a label of a calibrator", length=3)
            calibrator.add(
                number(score, "score of a label", -MAX_SCORE, MAX_SCORE),
                flag(positive, "a label's success"),
                number(weight, "weight of a label", 0.0, MAX_WEIGHT / 2, above=True),
            )
        for score in listed(state["recent"], "recent scores of a calibrator", RECENT_SCORES):
            calibrator._recent.append(number(score, "a recent score", -MAX_SCORE, MAX_SCORE))
        while len(calibrator._recent) > calibrator._num_recent:
            calibrator._recent.popleft()
        calibrator._num_since_scale = integer(state["num_since_scale"], "num_since_scale of a calibrator")
        calibrator._rebin()
        return calibrator

    def _success(self, b: int) -> float:
        """q of a bin. Source: ARRoL A.4. The prior is 1/2 while there are no labels."""
        total = self._totals[False] + self._totals[True]
        prior = self._totals[True] / total if total else 0.5
        smoothing = self._smoothing
        negative, positive = (
            (sum([counts[near] * share for near, share in self._neighbours[b]]) + smoothing)
            / (spread_total + smoothing * self._num_bins)
            for counts, spread_total in zip(self._counts, self._spread_totals, strict=True)
        )
        return prior * positive / (prior * positive + (1 - prior) * negative)

    def _bin(self, score: float) -> int:
        return min(self._num_bins - 1, int(self._num_bins * self.normalize(score)))

    def _count(self, label: LabelledScore, sign: int) -> None:
        b, weight = self._bin(label.score), sign * label.weight
        self._counts[label.positive][b] += weight
        self._totals[label.positive] += weight
        self._spread_totals[label.positive] += weight * self._reach[b]
        self.num_positive += sign * label.positive
        self._table = None

    def _rescale(self) -> None:
        """Called when half of the recent scores are new."""
        self._num_since_scale = 0
        n = len(self._recent)
        mean = fsum(self._recent) / n
        width = sqrt(fsum((score - mean) ** 2 for score in self._recent) / n) or 1.0
        if max(abs(mean - self._center), abs(width - self._width)) > SCALE_DRIFT * self._width:
            self._center, self._width = mean, width
            self._rebin()

    def _rebin(self) -> None:
        self._recent_counts = [0] * self._num_bins
        for score in self._recent:
            self._recent_counts[self._bin(score)] += 1
        self._counts = ([0.0] * self._num_bins, [0.0] * self._num_bins)
        self._totals, self._spread_totals = [0.0, 0.0], [0.0, 0.0]
        self.num_positive = 0
        for label in self._labels:
            self._count(label, +1)


STATE_FIELDS = ("signal", "labels", "recent", "scale", "num_since_scale")


def _check(score: float) -> None:
    if not isfinite(score):
        raise ValueError(f"a score must be a finite number, got {score}")

"""The scale of the scores of one version of a head: their center and width.

Logits of two versions of a head are not comparable: training sharpens them, and a new head may have any unit. The
position of a score among those of its version is comparable, because the candidates are alike. So a score is
standardized by center and width of the scores of its own version, and mapped to [0, 1] by the sigmoid.

A new version has no scores yet, and begins with its predecessor's scale. That scale is right if training has changed
the head a little, and wrong if another head was loaded. The new scores decide how fast it is left. The predecessor's
weight, in scores, is the number whose mean would lie as far away by chance (shrinkage after James and Stein). A
predecessor within the noise keeps its weight. One far beyond the noise hardly counts.

Invariant: an increasing linear change of all scores of a head changes no standardized score. Exceptions come only from
the remaining weight of a predecessor, or of the guess for a first version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, fsum, log, sqrt
from typing import Any, NamedTuple

from vllm_rollout.checks import MAX_COUNT, MAX_SCORE, integer, listed, number

MAX_STRENGTH = 256.0
"""Largest weight of an estimate for the next version, in scores."""
SCORE_VARIANCE = 1.5
"""Variance of the mean of n standardized scores, times n. Siblings arrive together and resemble each other."""
SURPRISE = 5.0
"""Squared differences of center and width from the version before, in variances of chance. Chance exceeds this once
in twelve times."""
MIN_SCORES = 4
"""Number of scores from which a width is estimated."""
CLIPPED_DEVIATIONS = 4.0
"""Standard deviations, from the quartiles, to which scores further out are moved."""
QUARTILE_RANGE = 1.349
"""Distance of the quartiles of a normal distribution, in standard deviations."""
LEAST_WIDTH = 2.0**-40
"""Smallest width of a scale, relative to its center and to its predecessor's width. float32 resolves no less."""
TOLERANCE = 0.5
"""Error of a scale, in its standard errors, from which it is replaced. Until then scores keep their bins."""
SETTLED_TOLERANCE = 0.25
"""Error of a scale, in its widths, from which it is replaced once it has had as many scores as are remembered. A
policy drifts, and each replacement moves all scores and labels to new bins."""
REMEMBERED_VERSIONS = 64
"""Newest versions whose scale is kept even if no window of a calibrator needs it."""
MOST_STANDARDIZED = 700.0
"""Largest standardized score, in widths. Its sigmoid is 0 or 1 long before."""
UNKNOWN = -1
"""Version of the scale before any version has scored."""


class Estimate(NamedTuple):
    center: float
    width: float
    strength: float
    """Weight of the estimate, in scores. 0: a guess."""


GUESS = Estimate(0.0, 1.0, 0.0)
"""Scale of a first version, whose logits are used unchanged."""


@dataclass(slots=True, eq=False)
class Scale:
    """The scale of one version, as long as it scores. A version that comes back has a new one."""

    version: int
    base: Estimate
    """Estimate of the predecessor."""
    now: Estimate
    num_scores: int = 0
    """Number of scores of this version."""
    num_new: int = 0
    """Number of scores since `now` was computed."""
    num_labels: int = 0
    """Labels of this version in the window."""

    @classmethod
    def after(cls, version: int, base: Estimate) -> Scale:
        return cls(version, base, base)

    def standardize(self, score: float) -> float:
        return min(MOST_STANDARDIZED, max(-MOST_STANDARDIZED, (score - self.now.center) / self.now.width))

    def normalize(self, score: float) -> float:
        """s' in [0, 1], by the sigmoid of the standardized score. Calibration would undo any other monotone map."""
        x = self.standardize(score)
        if x >= 0:
            return 1 / (1 + exp(-x))
        e = exp(x)
        return e / (1 + e)

    def is_due(self, num_recent: int) -> bool:
        """True if there are enough scores since `now` was computed: a third more, or half of those remembered."""
        return self.num_new * 4 >= self.num_scores or self.num_new * 2 >= num_recent

    def follow(self, scores: Sequence[float]) -> bool:
        """Recompute the scale from the newest scores of its version. Returns True if it has changed."""
        self.num_new = 0
        new, old = estimate(scores, self.base), self.now
        is_settled = self.num_scores > len(scores)
        error = SETTLED_TOLERANCE if is_settled else TOLERANCE * sqrt(SCORE_VARIANCE / new.strength)
        if abs(new.center - old.center) <= error * old.width and abs(log(new.width / old.width)) <= error:
            self.now = old._replace(strength=new.strength)
            return False
        self.now = new
        return True

    def to_state(self) -> list[float]:
        return [self.version, *self.base, *self.now, self.num_scores, self.num_new]

    @classmethod
    def from_state(cls, values: Any) -> Scale:
        """Restore a scale. Raises: ValueError for a state that no scale can have."""
        version, *numbers, num_scores, num_new = listed(values, "a scale of a calibrator", length=9)
        return cls(
            integer(version, "version of a scale", UNKNOWN),
            _estimate_of(numbers[:3]),
            _estimate_of(numbers[3:]),
            integer(num_scores, "num_scores of a scale"),
            integer(num_new, "num_new of a scale", 0, MAX_COUNT),
        )


class Scales:
    """The scales of one head's versions, or of the heads that replace it. A limited number is kept for late labels."""

    def __init__(self) -> None:
        self.present = Scale.after(UNKNOWN, GUESS)
        """The scale of the version that scored last."""
        self._newest: dict[int, Scale] = {UNKNOWN: self.present}
        """The scales by version, the newest last."""

    def __iter__(self) -> Iterator[Scale]:
        return iter(self._newest.values())

    def __len__(self) -> int:
        return len(self._newest)

    @classmethod
    def restored(cls, scales: Sequence[Scale], present: Scale) -> Scales:
        """Restore scales. Raises: ValueError if two of them have the same version."""
        restored = cls()
        restored.present, restored._newest = present, {scale.version: scale for scale in scales}
        if len(restored) < len(scales):
            raise ValueError(f"the first {len(scales)} scales of a calibrator must be of different versions")
        return restored

    def of(self, version: int | None) -> Scale:
        """The scale of a version. The present one if the version is unknown."""
        return self.present if version is None else self._newest.get(version, self.present)

    def begin(self, version: int) -> None:
        """Start a version. Call it also for another head with an earlier version number."""
        self.present = self._after_present(version)

    def for_score(self, version: int) -> Scale:
        """The scale for a new score of this version, which is now the present one."""
        if version != self.present.version:
            announced = self._newest.get(version)
            if announced is None or announced.num_scores:
                self.begin(version)
            else:
                self.present = announced
        return self.present

    def for_label(self, version: int) -> Scale:
        """The scale for a label. A version without scores here is another engine's, or its label comes very late."""
        return self._newest.get(version) or self._after_present(version)

    def _after_present(self, version: int) -> Scale:
        before = self.present
        if before.version == UNKNOWN and not before.num_scores and not before.num_labels:
            scale = before  # there is nothing that it was the scale of
            del self._newest[UNKNOWN]
            scale.version = version
        else:
            scale = Scale.after(version, self._newest.pop(version, before).now)
        self._newest[version] = scale
        if len(self._newest) > REMEMBERED_VERSIONS:
            del self._newest[next(other for other, known in self._newest.items() if known is not self.present)]
        return scale


def estimate(scores: Sequence[float], base: Estimate) -> Estimate:
    """The scale of these scores, given that of the version before.

    Center and width decide together whether the version is another head: one of them may be equal by chance.
    """
    count = len(scores)
    if not count:
        return base
    mean, deviation = _moments(scores)
    least = max(LEAST_WIDTH * max(abs(mean), base.width), 1 / MAX_SCORE)
    knows_width = count >= MIN_SCORES and deviation > least
    ratio = deviation / base.width if knows_width else 1.0
    prior = 0.0
    if base.strength:
        moved = ((mean - base.center) / base.width) ** 2
        chance = SCORE_VARIANCE * (ratio * ratio / count + 1 / base.strength)
        surprise, unlike = moved / chance, max(0.0, moved - chance)
        if knows_width:
            widened = log(ratio) ** 2
            chance = SCORE_VARIANCE / 2 * (1 / (count - 1) + 1 / base.strength)
            surprise, unlike = surprise + widened / chance, unlike + max(0.0, widened - chance)
        prior = SCORE_VARIANCE / ((unlike if surprise > SURPRISE else 0.0) + SCORE_VARIANCE / base.strength)
    weight = prior * min(1.0, ratio * ratio)
    center = (count * mean + weight * base.center) / (count + weight)
    width = base.width
    if knows_width:
        width = exp(((count - 1) * log(deviation) + prior * log(base.width)) / (count - 1 + prior))
    return Estimate(center, min(max(width, least), MAX_SCORE), min(MAX_STRENGTH, count + weight))


def _moments(scores: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation, with scores far out moved inwards."""
    ordered = sorted(scores)
    count = len(ordered)
    middle, distance = ordered[count // 2], ordered[3 * count // 4] - ordered[count // 4]
    if distance > 0:
        reach = CLIPPED_DEVIATIONS * distance / QUARTILE_RANGE
        low, high = middle - reach, middle + reach
        ordered = [min(high, max(low, score)) for score in ordered]
    mean = fsum(ordered) / count
    return mean, sqrt(fsum((score - mean) * (score - mean) for score in ordered) / max(1, count - 1))


def _estimate_of(values: Sequence[Any]) -> Estimate:
    center, width, strength = values
    return Estimate(
        number(center, "center of a scale", -MAX_SCORE, MAX_SCORE),
        number(width, "width of a scale", 1 / MAX_SCORE, MAX_SCORE),
        number(strength, "strength of a scale", 0.0, MAX_STRENGTH),
    )

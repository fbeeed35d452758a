"""The scale of the scores of one version of a head: where they lie, and how wide.

Logits of two versions of a head are not comparable: training sharpens them, and a head that is put may have any unit.
What is comparable is where a score lies among those of the same version, for the candidates are alike. So a score is
standardized by center and width of the scores of its own version, and brought to [0, 1] by the sigmoid.

A new version has no scores yet. It begins with its predecessor's scale, which is right when training has changed the
head a little and wrong when another head was put. How far to go from there to what its own scores say, these tell: the
predecessor counts as many scores as would have a mean so far away by chance (shrinkage after James and Stein). Within
its noise the predecessor stays, far beyond it hardly counts.

Invariant: an increasing linear change of all scores of a head changes no standardized score, but for what is left of a
predecessor or of the guess that a first version begins with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, fsum, log, sqrt
from typing import Any, NamedTuple

from vllm_rollout.group.checks import MAX_COUNT, MAX_SCORE, integer, listed, number

MAX_STRENGTH = 256.0
"""Scores that an estimate counts as, at most, for the next version."""
SCORE_VARIANCE = 1.5
"""Variance of the mean of n standardized scores, times n: siblings, which come together, resemble each other."""
SURPRISE = 5.0
"""Squared differences of center and width from the version before, in variances of chance: more of them chance makes
once in twelve times."""
MIN_SCORES = 4
"""Scores that tell a width."""
CLIPPED_DEVIATIONS = 4.0
"""Scores further out than this, in standard deviations by the quartiles, count as if they were there."""
QUARTILE_RANGE = 1.349
"""Distance of the quartiles of a normal distribution, in standard deviations."""
LEAST_WIDTH = 2.0**-40
"""Least width of a scale, over the size of its center and of its predecessor's width: float32 tells apart nothing
closer."""
TOLERANCE = 0.5
"""Standard errors of a scale by which it may be off before it is replaced: scores keep their place for a while."""
SETTLED_TOLERANCE = 0.25
"""Widths by which it may be off once it has had as many scores as are remembered: a policy drifts, and all that has a
place would get another one."""
REMEMBERED_VERSIONS = 64
"""Newest versions whose scale is kept although nothing in a calibrator's windows needs it."""
MOST_STANDARDIZED = 700.0
"""Scores further out, in widths, are all as far: their sigmoid is 0 or 1 long before."""
UNKNOWN = -1
"""Version of the scale before any version has scored."""


class Estimate(NamedTuple):
    center: float
    width: float
    strength: float
    """Scores that it stands on; 0: a guess."""


GUESS = Estimate(0.0, 1.0, 0.0)
"""A first version's logits are taken as they are."""


@dataclass(slots=True, eq=False)
class Scale:
    """The scale of one version, as long as it scores; a version that comes back has a new one."""

    version: int
    base: Estimate
    """Its predecessor's."""
    now: Estimate
    num_scores: int = 0
    """Seen of this version."""
    num_new: int = 0
    """Those of them that came since `now` was made."""
    num_labels: int = 0
    """Labels of this version in the window."""

    @classmethod
    def after(cls, version: int, base: Estimate) -> Scale:
        return cls(version, base, base)

    def standardize(self, score: float) -> float:
        return min(MOST_STANDARDIZED, max(-MOST_STANDARDIZED, (score - self.now.center) / self.now.width))

    def normalize(self, score: float) -> float:
        """s' in [0, 1], by the sigmoid of the standardized score. Any monotone map would do within a version:
        calibration undoes it."""
        x = self.standardize(score)
        if x >= 0:
            return 1 / (1 + exp(-x))
        e = exp(x)
        return e / (1 + e)

    def is_due(self, num_recent: int) -> bool:
        """Has it seen enough since `now` was made? A third more scores, and later on half of those remembered."""
        return self.num_new * 4 >= self.num_scores or self.num_new * 2 >= num_recent

    def follow(self, scores: Sequence[float]) -> bool:
        """Make it anew from the newest scores of its version; returns whether it has changed."""
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
        """Raises: ValueError."""
        version, *numbers, num_scores, num_new = listed(values, "a scale of a calibrator", length=9)
        return cls(
            integer(version, "version of a scale", UNKNOWN),
            _estimate_of(numbers[:3]),
            _estimate_of(numbers[3:]),
            integer(num_scores, "num_scores of a scale"),
            integer(num_new, "num_new of a scale", 0, MAX_COUNT),
        )


class Scales:
    """The scales of one head's versions, or of what replaces it; each is kept for labels that come late, up to a
    number."""

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
        """Raises: ValueError."""
        restored = cls()
        restored.present, restored._newest = present, {scale.version: scale for scale in scales}
        if len(restored) < len(scales):
            raise ValueError(f"the first {len(scales)} scales of a calibrator must be of different versions")
        return restored

    def of(self, version: int | None) -> Scale:
        """The present one where the version is not known."""
        return self.present if version is None else self._newest.get(version, self.present)

    def begin(self, version: int) -> None:
        """From now on this version scores; also when it is another head with the number of one before."""
        self.present = self._after_present(version)

    def for_score(self, version: int) -> Scale:
        """This version has scored."""
        if version != self.present.version:
            announced = self._newest.get(version)
            if announced is None or announced.num_scores:
                self.begin(version)
            else:
                self.present = announced
        return self.present

    def for_label(self, version: int) -> Scale:
        """A label of a version that has not scored here is another engine's, or comes very late."""
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

    Center and width tell together whether the version is another head: one of them may be the same by chance.
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
    """Mean and standard deviation, what lies far out brought in."""
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

"""Survival probabilities from success probabilities (ARRoL 4.2, Eq. 2, and our own rules).

Eq. 2 as printed is p = clip(kappa + delta + lambda (rho - q)) with lambda > 0. It falls with q: unlikely candidates
survive at any success rate. If success is rare (mean q < rho), this moves their mean *away* from rho. Lemma 4.1 asks
for the opposite. Below rho the removal of a candidate with q under the mean helps, above rho one with q over the mean.
So the sign has to follow the side of rho on which the population is. `"paper"` is Eq. 2 as printed.

`"balance"` solves for both aims. Among all rules with p in [min, max] it takes the one that disturbs least,

    minimise E[(p - kappa)^2]   subject to   E[p] = kappa,   E[p (q - rho)] = 0   (which is E[p q] / E[p] = rho),

because the inverse-probability weights of the trainer vary least near a uniform p. Its stationarity condition is p -
kappa = a + b q, clipped to the bounds (the bounds' multipliers act only where p touches them). That is Eq. 2's form
with a strength of either sign: p = clip(kappa + bias + strength (q - rho), min, max). For a fixed strength E[p] rises
with the bias. Along the curve E[p] = kappa, E[p q] rises with the strength, because mass moves to higher q. So both are
found by one-dimensional root search. If the bounds make rho unreachable, the strength ends at its limit on the right
side.

`"gradient"` is in gradient.py. The survivors are drawn in survivors.py.

Invariant: every survival probability lies within the plan's bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum

from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan

Point = tuple[float, float]
"""(success probability, weight)."""

MAX_SOLVED_STRENGTH = 8.0
"""Largest size of the strength in the balance rule. A difference of 1/8 in success probability, the precision of
calibration, then decides between the bounds of survival."""
MIN_BALANCED = 4.0
"""Candidates whose survival is balanced together. A smaller batch of siblings is filled up from the population.

Measured at 1, 4 and 16 siblings per batch (docs/development/log.md): more weakens the group's own balance.
"""
NUM_QUANTILES = 8
"""Points that represent the population."""
MASS_TOLERANCE = 1e-9
"""Accuracy of the mean survival probability."""
RATIO_TOLERANCE = 1e-6
"""Accuracy of the positive ratio among survivors."""
MAX_ITERATIONS = 60


@dataclass(frozen=True, slots=True)
class SurvivalRule:
    """Function from success probability q to survival probability. A positive strength keeps likely candidates.

    Eq. 2 is strength = -lambda.
    """

    bias: float
    strength: float
    target_positive_ratio: float
    keep_ratio: float
    min_survival: float
    max_survival: float

    def survival(self, q: float) -> float:
        """Survival probability of q. Does not fall with q if the strength is positive, does not rise if it is
        negative."""
        p = self.keep_ratio + self.bias + self.strength * (q - self.target_positive_ratio)
        return min(self.max_survival, max(self.min_survival, p))


def solve_paper(points: Sequence[Point], plan: PruningPlan) -> SurvivalRule:
    """Eq. 2: the bias for which mean survival over the points is `keep_ratio`, with strength = -lambda."""
    mass = plan.keep_ratio * fsum(weight for _, weight in points)
    return rule_of(-plan.strength, points, plan, mass)


def group_rule(
    batch: Iterable[float],
    earlier: Iterable[tuple[float, bool]],
    population: Sequence[Point],
    plan: PruningPlan,
    min_balanced: float = MIN_BALANCED,
) -> SurvivalRule:
    """The balance rule inside one group: Lemma 4.1 with the group's own mean.

    batch: q of the siblings to decide on now. earlier: (q, kept) of those decided before. Their deviation from the
    group's shares of survivors and of positives is compensated now. population: as `compress` returns it. It fills a
    batch up to `min_balanced` candidates in place of siblings still to come, since a batch of one cannot be balanced.
    """
    others = list(earlier)
    points, mass = group_share(batch, others, population, plan, min_balanced)
    num_kept = sum(kept for _, kept in others)
    positives = plan.target_positive_ratio * (num_kept + mass) - fsum(q for q, kept in others if kept)
    return _Problem(points, plan, mass, positives).solve()


def group_share(
    batch: Iterable[float],
    earlier: Sequence[tuple[float, bool]],
    population: Sequence[Point],
    plan: PruningPlan,
    min_balanced: float = MIN_BALANCED,
) -> tuple[list[Point], float]:
    """Points of one group's problem (`group_rule`), and the sum of their survival probabilities.

    With that sum the group keeps `keep_ratio` of its candidates, as nearly as the bounds allow.
    """
    own = [(q, 1.0) for q in batch]
    missing = max(0.0, min_balanced - len(own))
    points = own + [(q, missing * share) for q, share in population if missing]
    weight = fsum(w for _, w in points)
    low, high = _bounds(plan)
    wanted = plan.keep_ratio * (len(earlier) + weight) - sum(kept for _, kept in earlier)
    return points, min(high * weight, max(low * weight, wanted))


def rule_of(strength: float, points: Sequence[Point], plan: PruningPlan, mass: float) -> SurvivalRule:
    """The rule of this strength that keeps `mass` of the points."""
    return _Problem(points, plan, mass, 0.0).rule(strength)


def compress(points: Iterable[Point], num_points: int = NUM_QUANTILES) -> list[Point]:
    """A distribution as the means of its quantiles, with weights that sum to 1. Keeps the mean."""
    ordered = sorted(points)
    total = fsum(w for _, w in ordered)
    parts = [0.0] * num_points
    start = 0.0
    for q, w in ordered:
        end = start + w * num_points / total  # in units of one part
        for part in range(int(start), min(num_points, int(end) + 1)):
            parts[part] += q * max(0.0, min(end, part + 1) - max(start, part))
        start = end
    return [(q, 1 / num_points) for q in parts] if ordered else []


def _bounds(plan: PruningPlan) -> tuple[float, float]:
    """Bounds of survival, with the keep ratio between them. With a `keep_ratio` of 1 no candidate is pruned."""
    return plan.min_survival, 1.0 if plan.keep_ratio == 1 else plan.max_survival


class _Problem:
    """Sum of w p = mass and, as nearly as possible, sum of w p q = positives, over p = clip(level + strength q)."""

    def __init__(self, points: Sequence[Point], plan: PruningPlan, mass: float, positives: float) -> None:
        self._points = [point for point in points if point[1] > 0]
        self._plan = plan
        self._mass = mass
        self._positives = positives
        self._low, self._high = _bounds(plan)
        self._weight = fsum(w for _, w in self._points)
        self._level = plan.keep_ratio
        """The level of the last strength tried, near which the next search starts."""

    def solve(self) -> SurvivalRule:
        """The strength of least size that reaches `positives`, or comes nearest."""
        if not self._low * self._weight < self._mass < self._high * self._weight:
            return self.rule(0.0)  # every p is at the same bound, or there is no point at all
        tolerance = RATIO_TOLERANCE * self._weight
        near, near_excess = 0.0, self._excess(0.0)
        if abs(near_excess) <= tolerance:
            return self.rule(0.0)
        far = -MAX_SOLVED_STRENGTH if near_excess > 0 else MAX_SOLVED_STRENGTH
        far_excess = self._excess(far)
        if near_excess * far_excess > 0:
            return self.rule(far)
        strength = near
        for _ in range(MAX_ITERATIONS):
            # regula falsi, with the value of an end that stays halved (Illinois) for faster convergence
            strength = (near * far_excess - far * near_excess) / (far_excess - near_excess)
            excess = self._excess(strength)
            if abs(excess) <= tolerance:
                break
            if excess * far_excess < 0:
                near, near_excess = far, far_excess
            else:
                near_excess /= 2
            far, far_excess = strength, excess
        return self.rule(strength)

    def rule(self, strength: float) -> SurvivalRule:
        plan = self._plan
        self._excess(strength)
        bias = self._level - plan.keep_ratio + strength * plan.target_positive_ratio
        return SurvivalRule(bias, strength, plan.target_positive_ratio, plan.keep_ratio, self._low, self._high)

    def _excess(self, strength: float) -> float:
        """Positives beyond the wanted ones, at the level that keeps `mass`.

        Mass is a non-decreasing, piecewise linear function of the level. Newton steps find it, or bisection if a step
        leaves the bracket.
        """
        points, low, high = self._points, self._low, self._high
        if not points:
            self._level = self._plan.keep_ratio - strength * self._plan.target_positive_ratio  # bias 0
            return 0.0
        reach = [strength * q for q, _ in points]
        bottom, top = low - max(reach), high - min(reach)  # all p are `low`, or all are `high`
        level = min(top, max(bottom, self._level))
        tolerance = MASS_TOLERANCE * self._weight
        positives = 0.0
        for _ in range(MAX_ITERATIONS):
            mass = positives = slope = 0.0
            for q, w in points:
                p = level + strength * q
                if p < low:
                    p = low
                elif p > high:
                    p = high
                else:
                    slope += w
                mass += w * p
                positives += w * p * q
            miss = mass - self._mass
            if abs(miss) <= tolerance:
                break
            if miss > 0:
                top = level
            else:
                bottom = level
            level = level - miss / slope if slope else bottom
            if not bottom < level < top:
                level = (bottom + top) / 2
        self._level = level
        return positives - self._positives

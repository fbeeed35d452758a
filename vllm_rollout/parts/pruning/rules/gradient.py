"""Survival for the gradient: steered if a group would end without variance, and otherwise at random.

GRPO divides rewards by their standard deviation within the group. The useful part of a group's gradient is then
proportional to sqrt(rho (1 - rho)) of its survivors. That is almost constant, but 0 for groups whose survivors all
succeed or all fail. So the possible gain is the chance of *some* variance, 1 - V. Siblings succeed with probability q_i
and survive independently with p_i. If few groups are without survivors,

    V = V0 + V1,   V0 = prod (1 - p_i q_i)  (no survivor succeeds),   V1 = prod (1 - p_i (1 - q_i)).

Steering has a cost. A score that predicts success does so by features that cause success. Survivors chosen by it
therefore differ less along the gradient. The loss grows with R^2 = Var q / (q (1 - q)), the score's share of the
reward's variance. It also grows with the square of survival's variation. Both together, over n siblings and at the same
mean survival kappa:

    maximise  (1 - V)  -  R^2 / 2  mean((p_i - kappa)^2) / kappa^2 .

To first order in p - kappa, -dV / dp_i is q_i V0 + (1 - q_i) V1. Its slope in q_i is V0 - V1. The stationary point is
p_i = kappa + bias + strength q_i, clipped to the bounds, which is the form of Eq. 2, with

    strength = n kappa^2 (V0 - V1) / R^2 ,

taken at p = kappa. The cost's factor is the only free choice: a strength of 3/4 to 3/2 of this is as good within errors
(docs/development/log.md). If variance is certain, V0 - V1 is 0 and the draw is random. If success is rare, it is near 1
and likely candidates are kept. If success is frequent, it is near -1.

V0 and V1 belong to the group: the q of its siblings, with odds shifted by the prompt's earlier rewards. The population
counts beside these as `PRIOR_REWARDS` rewards. Within a group p follows q, since earlier rewards do not distinguish
siblings. V measures whether there is variance, not how much: with few survivors (4) it steers somewhat too much in the
middle.

Invariant: the draw is random if scores predict nothing, and p differs from `keep_ratio` only as far as V0 and V1
differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum, prod

from vllm_rollout.parts.pruning.rules.logistic import with_odds_times
from vllm_rollout.parts.pruning.rules.pruning import (
    MAX_SOLVED_STRENGTH,
    Point,
    SurvivalRule,
    compress,
    group_share,
    rule_of,
)
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan
from vllm_rollout.parts.pruning.rules.success import NO_REWARDS, PromptSuccess

PRIOR_REWARDS = 8.0
"""Weight of the population beside a prompt's own rewards, in rewards: the assumed similarity of prompts.

With 3 or 16 the mean signal to noise of groups whose gradient is known differs by less than 1 %.
"""
MIN_RATE = 1e-6
"""Distance of success rates from 0 and 1, so that odds stay finite."""
MIN_EXPLAINED = 1e-6
"""Smallest R^2 in the strength. Below, scores do not distinguish candidates, and the strength is at its limit."""


@dataclass(frozen=True, slots=True)
class Population:
    """Distribution of success probabilities over all candidates."""

    points: Sequence[Point]
    """The distribution, as `compress` returns it."""
    success_rate: float
    explained: float
    """R^2: share of the reward's variance that scores explain, if they are calibrated."""


def population_of(points: Sequence[Point]) -> Population:
    """The population with these success probabilities and weights."""
    total = fsum(w for _, w in points)
    if not total:
        return Population([], 0.5, 0.0)
    rate = fsum(q * w for q, w in points) / total
    variance = fsum((q - rate) ** 2 * w for q, w in points) / total
    rate = min(1 - MIN_RATE, max(MIN_RATE, rate))
    return Population(compress(points), rate, variance / (rate * (1 - rate)))


def gradient_rule(
    batch: Sequence[float],
    earlier: Iterable[tuple[float, bool]],
    population: Population,
    plan: PruningPlan,
    *,
    past: PromptSuccess = NO_REWARDS,
    num_to_come: int = 0,
) -> SurvivalRule:
    """The rule for the siblings of one group that are decided on now.

    batch, earlier: as of `group_rule`. past: rewards of the prompt's earlier groups. num_to_come: siblings that will be
    decided on later. The population represents them.
    """
    others = list(earlier)
    points, mass = group_share(batch, others, population.points, plan)
    weight = fsum(w for _, w in points)
    if not weight:
        return rule_of(0.0, points, plan, mass)
    share = mass / weight
    ratio = _odds_ratio(population.success_rate, past)
    chances = [(with_odds_times(q, ratio), 1.0, 1.0) for q, kept in others if kept]  # success, survival, how many
    chances += [(with_odds_times(q, ratio), share, 1.0) for q in batch]
    chances += [
        (with_odds_times(q, ratio), plan.keep_ratio, num_to_come * w) for q, w in population.points if num_to_come
    ]
    none_succeeds = prod((1 - p * q) ** count for q, p, count in chances)
    none_fails = prod((1 - p * (1 - q)) ** count for q, p, count in chances)
    num_siblings = len(others) + len(batch) + num_to_come
    pull = num_siblings * plan.keep_ratio**2 * (none_succeeds - none_fails)
    strength = pull / max(MIN_EXPLAINED, population.explained)
    return rule_of(min(MAX_SOLVED_STRENGTH, max(-MAX_SOLVED_STRENGTH, strength)), points, plan, mass)


def _odds_ratio(success_rate: float, past: PromptSuccess) -> float:
    """Odds of the prompt's success over the population's."""
    rate = (PRIOR_REWARDS * success_rate + past.num_successful) / (PRIOR_REWARDS + past.num_rewarded)
    rate = min(1 - MIN_RATE, max(MIN_RATE, rate))
    return rate * (1 - success_rate) / ((1 - rate) * success_rate)

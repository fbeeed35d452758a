"""A GRPO whose true gradient is known: prompts, candidates, scores, and what a group's estimate is worth.

A prompt's success rate is drawn from a beta distribution. A candidate has a part z along the policy's true gradient and
a propensity to succeed h = share z + noise, both standard normal; it is rewarded with 1 if h lies above the prompt's
threshold. Its grad log pi along that direction is z, so the true gradient E[(r - b) z] is positive. Its score is h plus
noise, as much as gives the AUC within a prompt whose rate is 1/2, and q the calibrated P(r = 1 | score) over all
prompts: a score that tells success tells it along what makes success. A group's estimate, 0 where its survivors have no
variance:

plain      the mean over survivors of A z, with GRPO's A = (r - mean) / std of survivors
weighted   the same A, each term times 1 / survival probability, over the number of candidates
corrected  mean, std and the final mean all weighted by 1 / survival probability

Invariant: groups depend on the world, their number and the seed, and on no rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean
from typing import Literal, NamedTuple

import numpy as np

from vllm_rollout.group.success import PromptSuccess

GROUP_SIZE = 16
PAST_REWARDS = 8
NORMAL = NormalDist()
NUM_POINTS = 81
"""Scores at which q is computed, from -5 to 5; in between it is interpolated."""

Estimate = Literal["plain", "weighted", "corrected"]
ESTIMATES: tuple[Estimate, ...] = ("plain", "weighted", "corrected")


@cache
def correlation(auc: float) -> float:
    """Of score and propensity, for that AUC among candidates of which half succeed."""
    low, high = 0.0, 0.9999
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if _auc(middle) > auc else (middle, high)
    return low


def _auc(correlated: float) -> float:
    scores = [step / 20 for step in range(-100, 101)]
    success = np.array([NORMAL.cdf(correlated * s / math.sqrt(1 - correlated**2)) for s in scores])
    density = np.array([NORMAL.pdf(s) for s in scores])
    positive, negative = success * density, (1 - success) * density
    positive, negative = positive / positive.sum(), negative / negative.sum()
    return float((positive * (np.cumsum(negative) - negative / 2)).sum())


class Groups(NamedTuple):
    """Some groups of one world."""

    rewards: np.ndarray  # [num_groups, group_size], 0 or 1
    propensity: np.ndarray  # [num_groups, group_size], h
    scores: np.ndarray  # [num_groups, group_size]
    q: np.ndarray  # [num_groups, group_size]
    past: list[PromptSuccess]
    """Rewards of each group's prompt."""

    def part(self, chosen: slice) -> Groups:
        return Groups(*(each[chosen] for each in self))

    def first(self, group_size: int) -> Groups:
        """The same prompts with the first so many of their candidates."""
        return Groups(*(each[:, :group_size] for each in self[:-1]), self.past)


@dataclass(frozen=True, slots=True)
class World:
    """Where prompts succeed with that mean and spread, and scores tell it so well."""

    share: float
    concentration: float
    auc: float
    rate: float
    group_size: int = GROUP_SIZE

    def thresholds(self, rates: np.ndarray) -> np.ndarray:
        return np.array([NORMAL.inv_cdf(1 - min(1 - 1e-9, max(1e-9, rate))) for rate in rates])

    def rates(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return rng.beta(self.rate * self.concentration, (1 - self.rate) * self.concentration, count)

    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """Scores and the q of each, over all prompts."""
        scores = np.linspace(-5, 5, NUM_POINTS)
        thresholds = self.thresholds(self.rates(np.random.default_rng(0), 400))
        correlated = correlation(self.auc)
        noise = math.sqrt(1 - correlated**2)
        q = [fmean(NORMAL.cdf((correlated * s - t) / noise) for t in thresholds) for s in scores]
        return scores, np.array(q)

    def population(self) -> list[tuple[float, float]]:
        scores, q = self.table()
        return [(float(each), NORMAL.pdf(float(s))) for s, each in zip(scores, q, strict=True)]

    def groups(self, count: int, seed: int) -> Groups:
        rng = np.random.default_rng(seed)
        rates = self.rates(rng, count)
        propensity = rng.standard_normal((count, self.group_size))
        rewards = (propensity > self.thresholds(rates)[:, None]).astype(float)
        correlated = correlation(self.auc)
        noise = math.sqrt(1 - correlated**2) * rng.standard_normal((count, self.group_size))
        scores = correlated * propensity + noise
        q = np.interp(scores, *self.table())
        past = [PromptSuccess(PAST_REWARDS, float(n)) for n in rng.binomial(PAST_REWARDS, rates)]
        return Groups(rewards, propensity, scores, q, past)


class Pruned(NamedTuple):
    """What became of some groups."""

    kept: np.ndarray  # [num_groups, group_size], bool
    survival: np.ndarray  # [num_groups, group_size]

    def part(self, chosen: slice) -> Pruned:
        return Pruned(self.kept[chosen], self.survival[chosen])


def no_variance(groups: Groups, pruned: Pruned) -> np.ndarray:
    """Groups whose survivors all succeed, all fail, or do not exist: [num_groups], bool."""
    return (groups.rewards * pruned.kept).sum(1) % np.maximum(1, pruned.kept.sum(1)) == 0


class Moments(NamedTuple):
    """Of groups' estimates along the true gradient."""

    mean: float
    explained: float
    """Variance across groups of what is expected given h: the mean over groups varies by it over their number."""
    variance: float

    @property
    def quality(self) -> float:
        """Squared mean over variance."""
        return self.mean**2 / self.variance if self.variance else 0.0

    def unbiased_quality(self, num_groups: int) -> float:
        """Without what chance adds to the square of a mean over so few groups."""
        return (self.mean**2 - self.explained / (num_groups - 1)) / self.variance if self.variance else 0.0


def moments(groups: Groups, pruned: Pruned, share: float, estimate: Estimate) -> Moments:
    kept = pruned.kept
    weights = kept / pruned.survival if estimate == "corrected" else kept.astype(float)
    total = np.where(kept.any(1), weights.sum(1), 1.0)[:, None]
    mean = (groups.rewards * weights).sum(1, keepdims=True) / total
    has_variance = ~no_variance(groups, pruned)[:, None]
    std = np.where(has_variance, np.sqrt(np.maximum(0.0, mean * (1 - mean))), 1.0)
    advantages = kept * has_variance * (groups.rewards - mean) / std
    terms = advantages / pruned.survival / kept.shape[1] if estimate == "weighted" else advantages * weights / total
    # given h, z is normal around share h with variance 1 - share^2
    expected = (terms * groups.propensity).sum(1) * share
    explained = float(expected.var())
    return Moments(float(expected.mean()), explained, explained + float((terms**2).sum(1).mean() * (1 - share**2)))


def quality(groups: Groups, pruned: Pruned, share: float, estimate: Estimate) -> float:
    """Squared mean over variance of the groups' estimates along the true gradient."""
    return moments(groups, pruned, share, estimate).quality

"""A GRPO whose true gradient is known: prompts, candidates, scores, and what a group's estimate is worth.

A prompt's success rate is drawn from a beta distribution. A candidate has a part z along the policy's true gradient and
a propensity to succeed h = share z + noise, both standard normal; it is rewarded with 1 if h lies above the prompt's
threshold. Its grad log pi along that direction is z, so the true gradient E[(r - b) z] is positive. Its score is h plus
noise, as much as gives the AUC within a prompt whose rate is 1/2, and q the calibrated P(r = 1 | score) over all
prompts: a score that tells success tells it along what makes success. A group's estimate is the mean over survivors of
A z, with GRPO's A = (r - mean) / std of survivors, and 0 where these have no variance.

Invariant: groups depend on the world, their number and the seed, and on no rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean
from typing import NamedTuple

import numpy as np

GROUP_SIZE = 16
NORMAL = NormalDist()
NUM_POINTS = 81
"""Scores at which q is computed, from -5 to 5; in between it is interpolated."""


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
    """Some groups of one world; each [num_groups, group_size]."""

    rewards: np.ndarray
    """0 or 1."""
    propensity: np.ndarray
    """h."""
    scores: np.ndarray
    q: np.ndarray

    def part(self, chosen: slice) -> Groups:
        return Groups(*(each[chosen] for each in self))

    def first(self, group_size: int) -> Groups:
        """The same prompts with the first so many of their candidates."""
        return Groups(*(each[:, :group_size] for each in self))


@dataclass(frozen=True, slots=True)
class World:
    """Where prompts succeed with that mean and spread, and scores tell it so well."""

    share: float
    concentration: float
    auc: float
    rate: float

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

    def groups(self, count: int, seed: int) -> Groups:
        rng = np.random.default_rng(seed)
        thresholds = self.thresholds(self.rates(rng, count))
        propensity = rng.standard_normal((count, GROUP_SIZE))
        rewards = (propensity > thresholds[:, None]).astype(float)
        correlated = correlation(self.auc)
        scores = correlated * propensity + math.sqrt(1 - correlated**2) * rng.standard_normal((count, GROUP_SIZE))
        return Groups(rewards, propensity, scores, np.interp(scores, *self.table()))


def no_variance(groups: Groups, kept: np.ndarray) -> np.ndarray:
    """Groups whose survivors all succeed, all fail, or do not exist: [num_groups], bool."""
    return (groups.rewards * kept).sum(1) % np.maximum(1, kept.sum(1)) == 0


def quality(groups: Groups, kept: np.ndarray, share: float) -> float:
    """Squared mean over variance of the groups' estimates along the true gradient, without what chance adds to the
    square of a mean over so few groups. What z does beyond h is integrated out.

    kept: [num_groups, group_size], bool.
    """
    total = np.where(kept.any(1), kept.sum(1), 1.0)[:, None]
    mean = (groups.rewards * kept).sum(1, keepdims=True) / total
    has_variance = ~no_variance(groups, kept)[:, None]
    std = np.where(has_variance, np.sqrt(np.maximum(0.0, mean * (1 - mean))), 1.0)
    terms = kept * has_variance * (groups.rewards - mean) / std / total
    # given h, z is normal around share h with variance 1 - share^2
    expected = (terms * groups.propensity).sum(1) * share
    explained = expected.var()
    variance = explained + (terms**2).sum(1).mean() * (1 - share**2)
    return float((expected.mean() ** 2 - explained / (len(kept) - 1)) / variance) if variance else 0.0

"""The benchmark of what pruning does to the gradient: its worlds, its measure, and what it says of the rules."""

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.pruning_gradient import PLAN, RULES, measure, prune, row_of, survival_of, table, worse_cells
from benchmarks.toy_grpo import Groups, Pruned, World, correlation, moments, no_variance, quality
from vllm_rollout.group.success import PromptSuccess

WORLD = World(share=0.5, concentration=3.0, auc=0.85, rate=0.3)


@pytest.mark.parametrize("auc", [0.5, 0.65, 0.85])
def test_scores_have_the_auc_and_q_is_calibrated(auc):
    """Where all prompts are alike."""
    world = replace(WORLD, auc=auc, concentration=1e6, rate=0.5)
    groups = world.groups(1500, seed=1)
    positive, negative = groups.q[groups.rewards == 1], groups.q[groups.rewards == 0]
    ranked = np.sort(negative)
    below = (np.searchsorted(ranked, positive, "left") + np.searchsorted(ranked, positive, "right")) / 2
    assert below.mean() / len(negative) == pytest.approx(auc, abs=0.02)
    assert groups.rewards.mean() == pytest.approx(groups.q.mean(), abs=0.02)
    likely = groups.q > np.median(groups.q)
    if auc > 0.5:
        assert groups.rewards[likely].mean() == pytest.approx(groups.q[likely].mean(), abs=0.02)
    assert (correlation(auc) == pytest.approx(0, abs=1e-6)) == (auc == 0.5)


def by_hand(rewards, propensity, kept, survival) -> tuple[Groups, Pruned]:
    rewards = np.array(rewards, dtype=float)
    past = [PromptSuccess(0, 0)] * len(rewards)
    unknown = np.full(rewards.shape, 0.5)
    groups = Groups(rewards, np.array(propensity, dtype=float), unknown, unknown, past)
    return groups, Pruned(np.array(kept, dtype=bool), np.array(survival, dtype=float))


def test_quality_by_hand():
    """A group with variance whose estimate is (1 (2) - 1 (-2)) / 2 = 2, and one without: 0."""
    groups, pruned = by_hand(
        [[1, 0, 0], [1, 1, 0]], [[2, -2, 9], [1, 3, 9]], [[1, 1, 0], [1, 1, 0]], [[0.5, 0.5, 0.5]] * 2
    )
    assert quality(groups, pruned, 1.0, "plain") == pytest.approx(1.0)  # mean 1, variance 1
    assert quality(groups, pruned, 1.0, "corrected") == pytest.approx(1.0)
    # with share 0.6 the mean is 0.6, and z itself adds (2 (1 / 2)^2) 0.64 in one of two groups
    assert quality(groups, pruned, 0.6, "plain") == pytest.approx(0.36 / (0.36 + 0.25 * 0.64))
    assert no_variance(groups, pruned).tolist() == [False, True]
    assert moments(groups, pruned, 1.0, "plain").unbiased_quality(5) == pytest.approx(1 - 1 / 4)


def test_few_groups_do_not_look_better_than_many():
    """Noise alone has no quality, however few groups it is measured in: 400 times 40 groups with no gradient."""
    measured = []
    for seed in range(400):
        rng = np.random.default_rng(seed)
        kept = np.ones((40, 4))
        groups, pruned = by_hand(rng.integers(0, 2, (40, 4)), rng.standard_normal((40, 4)), kept, kept)
        measured.append(moments(groups, pruned, 1.0, "plain"))
    assert np.mean([each.quality for each in measured]) > 0.02
    assert np.mean([each.unbiased_quality(40) for each in measured]) == pytest.approx(0, abs=0.01)


def test_weights_by_hand():
    """Kept with 1/4 and 3/4: the weights of the mean are 3/4 and 1/4, so A is 1 / sqrt 3 and -sqrt 3."""
    groups, pruned = by_hand([[1, 0], [1, 0]], [[1, 0], [1, -1]], [[1, 1], [1, 1]], [[0.25, 0.75]] * 2)
    estimates = [0.75 / math.sqrt(3), 0.75 / math.sqrt(3) + 0.25 * math.sqrt(3)]
    expected = np.mean(estimates) ** 2 / np.var(estimates)
    assert quality(groups, pruned, 1.0, "corrected") == pytest.approx(expected)
    estimates = [1 / 0.25 / 2, (1 / 0.25 + 1 / 0.75) / 2]
    assert quality(groups, pruned, 1.0, "weighted") == pytest.approx(np.mean(estimates) ** 2 / np.var(estimates))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_every_rule_keeps_the_share_wanted(rule, batch_size):
    groups = WORLD.groups(60, seed=2)
    pruned = prune(groups, survival_of(rule, WORLD, PLAN), 0, batch_size)
    assert pruned.kept.mean() == pytest.approx(1 if rule == "none" else 0.5, abs=0.05)
    assert pruned.survival.min() >= PLAN.min_survival


def test_the_gradient_rule_steers_where_it_pays_and_only_there():
    """The same groups for all rules, fixed seeds: 1,000 groups."""
    rare = measure(World(0.5, 20.0, 0.85, 0.05), PLAN, RULES, 250, 4, 16)
    middle = measure(World(0.5, 3.0, 0.85, 0.3), PLAN, RULES, 250, 4, 16)
    mean = {
        name: {rule: np.mean(estimates["plain"]) for rule, estimates in found.items()}
        for name, found in (("rare", rare), ("middle", middle))
    }
    assert mean["rare"]["gradient"] > 1.2 * mean["rare"]["random"]
    assert mean["rare"]["gradient"] > 0.95 * mean["rare"]["balance"]
    assert mean["middle"]["gradient"] > 1.05 * mean["middle"]["balance"]
    assert mean["middle"]["gradient"] > 0.97 * mean["middle"]["random"]
    rows = [{"rate": 0.05, **row_of(rare)}, {"rate": 0.3, **row_of(middle)}]
    assert worse_cells(rows, "gradient") == []
    assert len(table(rows).splitlines()) == 4
    rows[0]["gradient_minus_random"] = {"mean": -0.1, "error": 0.01}
    assert [cell["than"] for cell in worse_cells(rows, "gradient")] == ["random"]

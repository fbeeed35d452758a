"""The benchmark of what pruning is worth with what it learns: its worlds, streams, measures, the target."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.pruning_rules import run
from benchmarks.pruning_rules.run import Found, measure_world, ratio, report, row_of, target
from benchmarks.pruning_rules.streams import GROUPS_PER_STEP, WAYS, Measures, Stream, measure, stream
from benchmarks.pruning_rules.world import GROUP_SIZE, Groups, World, correlation, quality

WORLD = World(share=0.5, concentration=20.0, auc=0.85, rate=0.3)
NUM_TEACHING, NUM_GROUPS = 64, 96
GROUPS = WORLD.groups(NUM_GROUPS, seed=1)


@pytest.mark.parametrize("auc", [0.5, 0.65, 0.85])
def test_scores_have_the_auc_and_q_is_calibrated(auc):
    """Where all prompts are alike."""
    groups = World(share=0.5, concentration=1e6, auc=auc, rate=0.5).groups(1500, seed=1)
    positive, negative = groups.q[groups.rewards == 1], groups.q[groups.rewards == 0]
    ranked = np.sort(negative)
    below = (np.searchsorted(ranked, positive, "left") + np.searchsorted(ranked, positive, "right")) / 2
    assert below.mean() / len(negative) == pytest.approx(auc, abs=0.02)
    assert groups.rewards.mean() == pytest.approx(groups.q.mean(), abs=0.02)
    likely = groups.q > np.median(groups.q)
    if auc > 0.5:
        assert groups.rewards[likely].mean() == pytest.approx(groups.q[likely].mean(), abs=0.02)
    assert (correlation(auc) == pytest.approx(0, abs=1e-6)) == (auc == 0.5)


def by_hand(rewards, propensity) -> Groups:
    q = np.full(np.shape(rewards), 0.5)
    return Groups(np.array(rewards, dtype=float), np.array(propensity, dtype=float), q, q)


def test_measures_by_hand():
    """Of four candidates two and three are left; every other group has no variance."""
    groups = by_hand([[1, 0, 0, 1], [1, 1, 1, 0]] * 2, [[2, -2, 9, 9], [1, 3, 1, 9]] * 2)
    kept = np.array([[1, 1, 0, 0], [1, 1, 1, 0]] * 2, dtype=bool)
    success = np.array([[0.6, 0.4, np.nan, np.nan]] * 4)
    found = measure(groups, Stream(kept, success), share=1.0)
    worth = 1 - 1 / 3  # estimates are 2 and 0: mean 1, variance 1, and four groups know the mean with 1 / 3
    assert found == Measures(
        keep_ratio=5 / 8,
        positive_ratio=4 / 5,
        reward_variance=1 / 8,
        no_variance=1 / 2,
        quality=pytest.approx(worth),
        per_token=pytest.approx(worth / (2.5 + 1.5 / 8)),
        per_token_free=pytest.approx(worth / 2.5),
        error_of_q=pytest.approx(0.1),
    )
    # with share 0.6 the mean is 0.6, and z itself adds (2 (1 / 2)^2) 0.64 in every other group
    assert quality(groups, kept, 0.6) == pytest.approx((0.36 - 0.36 / 3) / (0.36 + 0.25 * 0.64))


def test_few_groups_do_not_look_better_than_many():
    """Noise alone has no quality, however few groups it is measured in: 400 times 40 groups with no gradient."""
    measured = []
    for seed in range(400):
        rng = np.random.default_rng(seed)
        groups = by_hand(rng.integers(0, 2, (40, 4)), rng.standard_normal((40, 4)))
        measured.append(quality(groups, np.ones((40, 4), dtype=bool), 1.0))
    assert np.mean(measured) == pytest.approx(0, abs=0.01)


def streams(*names: str) -> list[Stream]:
    return [stream(GROUPS, WAYS[name], NUM_TEACHING, seed=0) for name in names]


def test_a_stream_begins_cold_and_learns_what_is_true():
    (gradient,) = streams("gradient")
    cold = np.isnan(gradient.success).all(1)
    first = int(np.argmin(cold))
    assert cold[:first].all()
    assert not cold[first:].any()
    assert first % GROUPS_PER_STEP == 0 < first
    assert gradient.kept[:first].all()
    assert gradient.kept[first:].mean() == pytest.approx(0.5, abs=0.05)
    errors = gradient.success[NUM_TEACHING:] - GROUPS.q[NUM_TEACHING:]
    assert np.sqrt((errors**2).mean()) < 0.1 < GROUPS.q.std()


def test_ways_differ_in_what_they_are_named_for_only():
    gradient, audits, swap, none, random = streams("gradient", "audits", "swap", "none", "random")
    before = slice(NUM_TEACHING)
    assert np.array_equal(swap.kept[before], gradient.kept[before])
    assert not np.array_equal(swap.success[NUM_TEACHING:], gradient.success[NUM_TEACHING:])
    assert np.abs(swap.success[-16:] - gradient.success[-16:]).mean() < 0.1  # it has found the new scale
    audited = audits.kept[32:].all(1)
    assert 0 < audited.sum() < len(audited) / 4
    assert none.kept.all()
    assert (random.kept.sum(1) == GROUP_SIZE / 2).all()


def test_ratios_have_the_error_of_the_difference_that_they_come_from():
    assert ratio([2.0, 4.0], [1.0, 2.0]) == {"mean": 2.0, "error": 0.0}
    found = ratio([2.0, 4.0], [2.0, 2.0])
    assert found == {"mean": 1.5, "error": pytest.approx(np.std([-1, 1], ddof=1) / 2 / 2**0.5)}
    assert ratio([1.0, 1.0], [-1.0, 1.0]) is None


def test_the_target_is_missed_beyond_two_errors_only():
    measured = Measures(0.5, 0.3, 0.1, 0.1, 1.0, 1.0, 1.0, None)
    other = [replace(measured, per_token=value) for value in (1.1, 1.2)]  # a ratio of 0.87 with an error of 0.04
    found = {way: [measured, measured] for way in WAYS} | {"none": other}
    missed = target([row_of(WORLD, Found(found, []))], "gradient")
    assert missed["holds"] == {"random": 1, "fewer": 1, "none": 0}
    assert missed["better"] == {"random": 0, "fewer": 0, "none": 0}
    assert [cell["than"] for cell in missed["fails"]] == ["none"]
    close = [replace(measured, per_token=value) for value in (1.0, 1.1)]
    assert target([row_of(WORLD, Found(found | {"none": close}, []))], "gradient")["fails"] == []
    assert run.verdict(None) == "unknown"


def test_a_cell_has_every_way_and_every_table_its_rows():
    found = measure_world(WORLD, num_groups=16, min_learning=16, seeds=range(2))
    assert found.measures.keys() == WAYS.keys()
    row = row_of(WORLD, found)
    text = report({"learned": [row], "target": [target([row], "gradient")]})
    assert text.count("### What is kept") == len(WAYS)
    assert "| gradient | per_token | " in text
    assert "| 20 | 0.85 | 0.3 | " in text


def test_fewer_candidates_are_the_first_of_the_same_groups_and_cost_nothing_else():
    fewer = GROUPS.first(WAYS["fewer"].group_size)
    assert fewer.rewards.tolist() == GROUPS.rewards[:, :8].tolist()
    measured = measure(fewer, stream(fewer, WAYS["fewer"], NUM_TEACHING, seed=0), WORLD.share)
    assert measured.keep_ratio == 1
    assert measured.per_token == pytest.approx(measured.quality / 8)


def test_the_report_advises_the_better_of_pruning_and_fewer():
    """Where success is rare and scores are good it is pruning; where every second answer is right it is not."""
    for rate, better in ((0.1, "prune"), (0.5, "fewer")):
        groups = replace(WORLD, rate=rate).groups(400, seed=2)
        assert stream(groups, WAYS["gradient"], 0, seed=0).advice.cheaper == better

"""The benchmark of what pruning is worth with what it learns: streams, measures, the target."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.pruning_rules import known, learned, tables
from benchmarks.pruning_rules.learned import WAYS, Found, Measures, Stream
from benchmarks.toy_grpo import GROUP_SIZE, Groups, Pruned, World
from vllm_rollout.group.success import PromptSuccess

WORLD = World(share=0.5, concentration=20.0, auc=0.85, rate=0.3)
NUM_TEACHING, NUM_GROUPS = 64, 96
GROUPS = WORLD.groups(NUM_GROUPS, seed=1)


def streams(*names: str) -> list[Stream]:
    return [learned.stream(GROUPS, WAYS[name], NUM_TEACHING, seed=0) for name in names]


def test_measures_by_hand():
    """Of four candidates two and three are left; every other group has no variance."""
    rewards = np.array([[1.0, 0, 0, 1], [1, 1, 1, 0]] * 2)
    propensity = np.array([[2.0, -2, 9, 9], [1, 3, 1, 9]] * 2)
    kept = np.array([[1, 1, 0, 0], [1, 1, 1, 0]] * 2, dtype=bool)
    q = np.full((4, 4), 0.5)
    groups = Groups(rewards, propensity, q, q, [PromptSuccess(0, 0)] * 4)
    success = np.array([[0.6, 0.4, np.nan, np.nan]] * 4)
    found = learned.measure(groups, Stream(Pruned(kept, np.full((4, 4), 0.5)), success), share=1.0)
    quality = 1 - 1 / 3  # estimates are 2 and 0: mean 1, variance 1, and four groups know the mean with 1 / 3
    assert found == Measures(
        keep_ratio=5 / 8,
        positive_ratio=4 / 5,
        reward_variance=1 / 8,
        no_variance=1 / 2,
        quality=pytest.approx(quality),
        per_token=pytest.approx(quality / (2.5 + 1.5 / 8)),
        per_token_free=pytest.approx(quality / 2.5),
        error_of_q=pytest.approx(0.1),
    )


def test_a_stream_begins_cold_and_learns_what_is_true():
    (stream,) = streams("gradient")
    cold = np.isnan(stream.success).all(1)
    first = int(np.argmin(cold))
    assert cold[:first].all()
    assert not cold[first:].any()
    assert first % learned.GROUPS_PER_STEP == 0 < first
    assert stream.pruned.kept[:first].all()
    assert stream.pruned.kept[first:].mean() == pytest.approx(0.5, abs=0.05)
    errors = stream.success[NUM_TEACHING:] - GROUPS.q[NUM_TEACHING:]
    assert np.sqrt((errors**2).mean()) < 0.1 < GROUPS.q.std()


def test_ways_differ_in_what_they_are_named_for_only():
    gradient, audits, swap, none, random = streams("gradient", "audits", "swap", "none", "random")
    before = slice(NUM_TEACHING)
    assert np.array_equal(swap.pruned.kept[before], gradient.pruned.kept[before])
    assert not np.array_equal(swap.success[NUM_TEACHING:], gradient.success[NUM_TEACHING:])
    assert np.abs(swap.success[-16:] - gradient.success[-16:]).mean() < 0.1  # it has found the new scale
    warm = slice(32, None)
    audited = audits.pruned.kept[warm].all(1)
    assert 0 < audited.sum() < len(audited) / 4
    assert (audits.pruned.survival[warm][audited] == 1).all()
    assert none.pruned.kept.all()
    assert (random.pruned.kept.sum(1) == GROUP_SIZE / 2).all()


def test_ratios_have_the_error_of_the_difference_that_they_come_from():
    assert learned.ratio([2.0, 4.0], [1.0, 2.0]) == {"mean": 2.0, "error": 0.0}
    found = learned.ratio([2.0, 4.0], [2.0, 2.0])
    assert found == {"mean": 1.5, "error": pytest.approx(np.std([-1, 1], ddof=1) / 2 / 2**0.5)}
    assert learned.ratio([1.0, 1.0], [-1.0, 1.0]) is None


def test_the_target_is_missed_beyond_two_errors_only():
    measured = Measures(0.5, 0.3, 0.1, 0.1, 1.0, 1.0, 1.0, None)
    other = [replace(measured, per_token=value) for value in (1.1, 1.2)]  # a ratio of 0.87 with an error of 0.04
    found = {way: [measured, measured] for way in WAYS} | {"none": other}
    row = learned.row_of(WORLD, Found(found, []))
    target = learned.target([row], "gradient")
    assert target["holds"] == {"random": 1, "fewer": 1, "none": 0}
    assert target["better"] == {"random": 0, "fewer": 0, "none": 0}
    assert [cell["than"] for cell in target["fails"]] == ["none"]
    assert "gradient < none: spread 20, AUC 0.85, rate 0.3: × 0.87" in tables.targets([target])
    assert learned.target([row], "none")["better"] == {"random": 1, "fewer": 1, "none": 0}
    close = [replace(measured, per_token=value) for value in (1.0, 1.1)]
    near = learned.row_of(WORLD, Found(found | {"none": close}, []))
    assert learned.target([near], "gradient")["fails"] == []
    assert learned.verdict(None) == "unknown"
    assert "holds everywhere" in tables.targets([learned.target([near], "gradient")])


def test_a_cell_has_every_way_and_every_table_its_rows():
    found = learned.measure_world(WORLD, num_groups=16, min_learning=16, num_seeds=2)
    assert found.measures.keys() == WAYS.keys()
    row = learned.row_of(WORLD, found)
    record = {
        "learned": [row],
        "target": [learned.target([row], "gradient")],
        "arrival": [{"rate": 0.3, "keep_ratio": {"mean": 0.5, "error": 0.01}}],
        "calibration": [{"method": "paper"}],
        "labels": [{"weighted": True}],
    }
    report = tables.report(record)
    assert report.count("### What is kept") == len(WAYS)
    assert "| 0.3 | 0.500 ± 0.010 |" in report


def test_weights_take_back_what_selection_does_to_a_success_rate():
    """One drifting and one still stream of 256 groups; fixed seeds."""
    plan = replace(known.PLAN, rule="balance")
    still = known.STREAMS["rate 0.3"]
    plain, weighted = (known.stream(still, plan, is_weighted, 256, seed=0) for is_weighted in (False, True))
    assert abs(weighted.success_rate_bias) < 0.04 < plain.success_rate_bias
    moving = known.stream(known.STREAMS["rate 0.6 -> 0.1"], plan, True, 256, seed=0)
    assert 0 < moving.survivors_positive_ratio < 0.6


def test_fewer_candidates_are_the_first_of_the_same_groups_and_cost_nothing_else():
    fewer = GROUPS.first(WAYS["fewer"].group_size)
    assert fewer.rewards.tolist() == GROUPS.rewards[:, :8].tolist()
    measured = learned.measure(fewer, learned.stream(fewer, WAYS["fewer"], NUM_TEACHING, seed=0))
    assert measured.keep_ratio == 1
    assert measured.per_token == pytest.approx(measured.quality / 8)


def test_the_report_advises_the_better_of_pruning_and_fewer():
    """Where success is rare and scores are good it is pruning; where every second answer is right it is not."""
    for rate, better in ((0.1, "prune"), (0.5, "fewer")):
        groups = replace(WORLD, rate=rate).groups(400, seed=2)
        assert learned.stream(groups, WAYS["gradient"], 0, seed=0).advice.cheaper == better

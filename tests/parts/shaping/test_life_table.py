"""The life table: a product-limit estimate that censoring does not bend, and a tail that does not run away."""

import math
import random
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.parts.shaping.rules.life_table import (
    LEFT,
    MAX_RATE,
    MAX_TAIL_STD,
    MIN_RATE,
    MIN_TAIL_STD,
    NUM_BINS,
    PRIOR_LOG_STD,
    STEP,
    SurvivalCurve,
    binned,
)

sums = st.lists(st.floats(0, 1e12), min_size=NUM_BINS, max_size=NUM_BINS)


def table_of(ended: list[float], cut: list[float]) -> tuple[list[float], list[float]]:
    """Table of observed values of w, without scaling."""
    group = binned([(w, 1) for w in ended], [(w, 1) for w in cut])
    before = group.first - LEFT
    behind = NUM_BINS - before - len(group.ends)
    return (
        [0.0] * before + group.ends + [0.0] * behind,
        [float(group.num)] * before + group.risks + [0.0] * behind,
    )


def share_beyond(curve: SurvivalCurve, w: float) -> float:
    return curve.reach(w / STEP - LEFT)[2]


def test_a_group_counts_by_bins_of_log_length():
    group = binned([(0.05, 1), (0.30, 2)], [(0.40, 3)])
    assert (group.first, group.num, group.num_ends) == (0, 6, 3)
    assert group.ends == [1, 0, 2, 0]
    assert group.risks == pytest.approx([5 + 0.4, 5, 3 + 2 * 0.4, 3 * 0.2])


def test_what_no_table_spans_moves_up():
    group = binned([(0.0, 1), (50.0, 1)], [])
    assert len(group.ends) == NUM_BINS
    assert group.ends[0] == group.ends[-1] == 1


def test_before_anything_is_seen_the_curve_is_log_normal():
    curve = SurvivalCurve([0.0] * NUM_BINS, [0.0] * NUM_BINS)
    normal = NormalDist(0, PRIOR_LOG_STD)
    for w in (-1.0, -0.5, 0.0, 0.5, 1.0):
        assert share_beyond(curve, w) == pytest.approx(1 - normal.cdf(w), abs=0.005)


def draw_two_humps(chance: random.Random) -> float:
    return chance.gauss(0.0 if chance.random() < 0.7 else 1.6, 0.25)


@pytest.mark.parametrize("draw", [lambda chance: math.log(chance.gammavariate(1.5, 1)), draw_two_humps])
def test_random_stops_do_not_bend_the_curve(draw):
    chance = random.Random(5)
    values, stops = [draw(chance) for _ in range(20_000)], [chance.uniform(-2, 3) for _ in range(20_000)]
    pairs = list(zip(values, stops, strict=True))
    curve = SurvivalCurve(*table_of([w for w, stop in pairs if w <= stop], [stop for w, stop in pairs if w > stop]))
    for w in (-1.0, 0.0, 0.5, 1.0, 1.5):
        assert share_beyond(curve, w) == pytest.approx(sum(value > w for value in values) / 20_000, abs=0.02)


def test_beyond_what_is_seen_a_log_normal_curve_goes_on_as_one():
    chance, normal = random.Random(1), NormalDist(0, 0.6)
    values = [chance.gauss(0, 0.6) for _ in range(20_000)]
    curve = SurvivalCurve(*table_of([w for w in values if w <= 0.3], [0.3] * sum(w > 0.3 for w in values)))
    assert curve.tail_std == pytest.approx(0.6, rel=0.1)
    for w in (0.6, 1.0, 1.4):
        assert share_beyond(curve, w) == pytest.approx(1 - normal.cdf(w), abs=0.02)


def test_a_gap_in_what_is_seen_is_no_reason_for_a_long_tail():
    """Seven tenths end near one, and few of what ran on were seen to end: a slope of these few alone would be flat."""
    ended = [random.Random(i).gauss(0, 0.25) for i in range(700)] + [1.0, 1.1]
    curve = SurvivalCurve(*table_of(ended, [0.7] * 200 + [1.2] * 98))
    assert curve.tail_std < 0.6


@settings(max_examples=60, deadline=None)
@given(sums, sums, st.floats(-1e3, 1e3))
def test_any_table_gives_a_curve_that_falls_and_moments_that_are_finite(ends, risks, position):
    curve = SurvivalCurve(ends, risks)
    assert all(MIN_RATE <= rate <= MAX_RATE for rate in curve.rates)
    assert MIN_TAIL_STD <= curve.tail_std <= MAX_TAIL_STD
    assert all(before >= after for before, after in zip(curve.survival, curve.survival[1:], strict=False))
    assert curve.survival[0] == 1
    assert curve.survival[-1] == 0
    first, second = curve.beyond(position)
    assert 0 < first <= math.exp((LEFT + NUM_BINS) * STEP)
    assert first**2 <= second * (1 + 1e-9)


def test_the_moments_beyond_a_stop_are_those_of_the_curve():
    chance = random.Random(3)
    values = [chance.gauss(0, 0.5) for _ in range(50_000)]
    curve = SurvivalCurve(*table_of(values, []))
    for w in (-1.0, 0.0, 0.55):
        beyond = [math.exp(value) for value in values if value > w]
        first, second = curve.beyond(w / STEP - LEFT)
        assert first == pytest.approx(sum(beyond) / len(beyond), rel=0.02)
        assert second == pytest.approx(sum(x * x for x in beyond) / len(beyond), rel=0.04)

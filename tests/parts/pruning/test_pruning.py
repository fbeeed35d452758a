import random
from dataclasses import replace
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.parts.pruning.rules.pruning import (
    MAX_SOLVED_STRENGTH,
    SurvivalRule,
    compress,
    group_rule,
    solve_paper,
)
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan

PLAN = PruningPlan(detection_length=16)
NORMAL = NormalDist()


def calibrated(rate: float, distance: float) -> list[tuple[float, float]]:
    """(q, weight) of scores that are normal around +-distance / 2 for either label: q is the truth."""
    points = []
    for step in range(-120, 121):
        x = step / 20
        positive, negative = rate * NORMAL.pdf(x - distance / 2), (1 - rate) * NORMAL.pdf(x + distance / 2)
        points.append((positive / (positive + negative), positive + negative))
    return points


def kept(rule: SurvivalRule, points: list[tuple[float, float]]) -> tuple[float, float]:
    """E[p] and E[p q] / E[p]."""
    mass = sum(w * rule.survival(q) for q, w in points)
    return mass / sum(w for _, w in points), sum(w * q * rule.survival(q) for q, w in points) / mass


def balance(points: list[tuple[float, float]], plan: PruningPlan) -> SurvivalRule:
    """The rule of a group of which nobody is due or decided on: that of its population."""
    return group_rule([], [], points, plan, min_balanced=1.0)


def test_survival_is_eq_2_clipped():
    rule = SurvivalRule(
        bias=0.1, strength=-0.5, target_positive_ratio=0.5, keep_ratio=0.4, min_survival=0.3, max_survival=0.7
    )
    assert rule.survival(0.6) == pytest.approx(0.4 + 0.1 + 0.5 * (0.5 - 0.6))
    assert rule.survival(0.0) == 0.7
    assert rule.survival(1.0) == 0.3


def test_paper_bias_by_hand():
    """q 0.2 and 0.6, keep 0.5, rho 0.5, lambda 0.5: p = 0.5 + bias + (0.15, -0.05), so the bias is -0.05."""
    rule = solve_paper([(0.2, 1.0), (0.6, 1.0)], PLAN)
    assert rule.bias == pytest.approx(-0.05)
    assert (rule.survival(0.2), rule.survival(0.6)) == pytest.approx((0.6, 0.4))


def test_balance_by_hand():
    """q 0.2 and 0.6: p = (0.5 -+ d) with 0.2 (0.5 - d) + 0.6 (0.5 + d) = 0.5 gives d = 0.25; strength 2 d / 0.4.
    With max_survival 0.7 the likely one stops there, and the other follows the mean."""
    rule = balance([(0.2, 1.0), (0.6, 1.0)], PLAN)
    assert rule.strength == pytest.approx(1.25, abs=1e-4)
    assert (rule.survival(0.2), rule.survival(0.6)) == pytest.approx((0.25, 0.75), abs=1e-5)
    bounded = balance([(0.2, 1.0), (0.6, 1.0)], replace(PLAN, max_survival=0.7))
    assert (bounded.survival(0.2), bounded.survival(0.6)) == pytest.approx((0.3, 0.7), abs=1e-6)


@pytest.mark.parametrize(
    ("rate", "survivors", "strength"), [(0.30, 0.50, 2.5), (0.70, 0.50, -2.5), (0.50, 0.50, 0.0), (0.14, 0.24, None)]
)
def test_balance_on_calibrated_scores(rate, survivors, strength):
    """A head of AUC 0.88, keep 0.5. At 0.14 the bounds of survival leave no more to gain."""
    points = calibrated(rate, 1.68)
    rule = balance(points, PLAN)
    assert kept(rule, points) == pytest.approx((0.5, survivors), abs=0.006)
    if strength is None:
        assert rule.strength == MAX_SOLVED_STRENGTH
    else:
        assert rule.strength == pytest.approx(strength, abs=0.1)


@pytest.mark.parametrize(
    ("rate", "strength", "survivors"), [(0.30, 0.5, 0.21), (0.50, 0.5, 0.39), (0.70, 0.5, 0.61), (0.30, -0.5, 0.39)]
)
def test_eq_2_as_printed_keeps_the_unlikely_and_with_the_sign_reversed_fits_table_4(rate, strength, survivors):
    points = calibrated(rate, 1.7)
    rule = solve_paper(points, replace(PLAN, strength=strength))
    assert kept(rule, points) == pytest.approx((0.5, survivors), abs=0.01)


probability = st.floats(0.0, 1.0)
populations = st.lists(st.tuples(probability, st.floats(0.01, 100.0)), min_size=1, max_size=40)
plans = st.builds(
    lambda keep, target, low, high, strength: PruningPlan(
        16, "balance", min(max(keep, min(low, high)), high), target, strength, min(low, high), high
    ),
    st.floats(0.02, 1.0),
    st.floats(0.05, 0.95),
    st.floats(0.01, 0.5),
    st.floats(0.3, 1.0),
    st.floats(0.0, 20.0),
)


@settings(max_examples=80, deadline=None)
@given(populations, plans, st.sampled_from([solve_paper, balance]))
def test_mean_survival_is_the_keep_ratio(points, plan, solve):
    rule = solve(points, plan)
    assert kept(rule, points)[0] == pytest.approx(plan.keep_ratio, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(populations, plans, st.sampled_from([solve_paper, balance]), probability, probability)
def test_survival_is_monotone_in_q_and_within_bounds(points, plan, solve, a, b):
    rule = solve(points, plan)
    low, high = sorted((a, b))
    difference = rule.survival(high) - rule.survival(low)
    assert difference * rule.strength >= 0
    assert plan.min_survival <= rule.survival(a) <= plan.max_survival


@settings(max_examples=40, deadline=None)
@given(populations, plans)
def test_balance_comes_as_near_as_any_strength(points, plan):
    """Brute force over the strengths: none with the same mean survival is nearer to the target."""
    target = plan.target_positive_ratio
    reached = abs(kept(balance(points, plan), points)[1] - target)
    for i in range(-20, 21):
        other = solve_paper(points, replace(plan, strength=i / 20 * MAX_SOLVED_STRENGTH))
        assert reached <= abs(kept(other, points)[1] - target) + 1e-5 / plan.keep_ratio


def test_keep_ratio_one_keeps_everything():
    rule = balance([(0.1, 1.0), (0.7, 2.0)], replace(PLAN, keep_ratio=1.0))
    assert [rule.survival(q) for q in (0.0, 0.5, 1.0)] == [1.0, 1.0, 1.0]


def test_no_points_mean_the_keep_ratio():
    assert balance([], PLAN).survival(0.3) == 0.5
    assert solve_paper([], PLAN).survival(0.5) == 0.5


def test_group_is_balanced_by_its_own_mean():
    """A group above the target in a population below it: the likely ones go."""
    population = compress(calibrated(0.2, 1.7))
    batch = [0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97]
    rule = group_rule(batch, [], population, PLAN)
    assert rule.strength < 0
    assert balance(population, PLAN).strength > 0
    assert kept(rule, [(q, 1.0) for q in batch])[0] == pytest.approx(0.5)


def test_group_makes_up_for_earlier_siblings():
    """Two likely ones were kept: as many as possible of the four due now should be unlikely, and fewer are kept."""
    batch = [0.2, 0.4, 0.6, 0.8]
    alone = group_rule(batch, [], [], PLAN)
    after = group_rule(batch, [(0.9, True), (0.9, True)], [], PLAN)
    assert sum(map(alone.survival, batch)) == pytest.approx(2)
    assert sum(map(after.survival, batch)) == pytest.approx(1)
    assert after.strength < 0 == round(alone.strength, 3)
    spared = group_rule(batch, [(0.9, False), (0.9, False)], [], PLAN)
    assert sum(map(spared.survival, batch)) == pytest.approx(3)


def test_a_sibling_alone_is_judged_by_the_population():
    population = compress(calibrated(0.2, 1.7))
    survival = [group_rule([q], [], population, PLAN).survival(q) for q in (0.05, 0.3, 0.6)]
    assert survival == sorted(survival)
    assert survival[2] - survival[0] > 0.3


def test_compress_keeps_mass_order_and_mean():
    points = [(0.9, 1.0), (0.1, 2.0), (0.5, 5.0)]
    parts = compress(points, 4)
    assert parts == [(0.1, 0.25), (0.5, 0.25), (0.5, 0.25), (pytest.approx(0.7), 0.25)]
    rng = random.Random(0)
    points = [(rng.random(), rng.random()) for _ in range(100)]
    mean = sum(q * w for q, w in points) / sum(w for _, w in points)
    assert sum(q * w for q, w in compress(points)) == pytest.approx(mean)
    assert compress([]) == []

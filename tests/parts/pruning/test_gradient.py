from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.parts.pruning.rules.gradient import PRIOR_REWARDS, Population, gradient_rule, population_of
from vllm_rollout.parts.pruning.rules.pruning import MAX_SOLVED_STRENGTH
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan
from vllm_rollout.parts.pruning.rules.success import PromptSuccess

PLAN = PruningPlan(detection_length=16)
HALVES = population_of([(0.25, 1.0), (0.75, 1.0)])


def survival(batch, population=HALVES, plan=PLAN, earlier=(), **given):
    rule = gradient_rule(batch, earlier, population, plan, **given)
    return [rule.survival(q) for q in batch]


def test_population_by_hand():
    """Rate 1/2, variance 1/16 of at most 1/4."""
    assert HALVES.success_rate == 0.5
    assert HALVES.explained == pytest.approx(0.25)
    assert population_of([(0.3, 2.0)]).explained == 0
    assert population_of([]).points == []


def test_strength_by_hand():
    """Four siblings of q 0.1, 0.1, 0.1, 0.5, half kept: V0 = 0.95^3 0.75, V1 = 0.55^3 0.75, n kappa^2 = 1."""
    population = Population([(0.2, 1.0)], 0.2, 0.5)
    rule = gradient_rule([0.1, 0.1, 0.1, 0.5], [], population, PLAN)
    assert rule.strength == pytest.approx((0.95**3 * 0.75 - 0.55**3 * 0.75) / 0.5)
    assert rule.survival(0.5) - rule.survival(0.1) == pytest.approx(0.4 * rule.strength)


def test_a_prompts_past_shifts_the_odds_by_hand():
    """None of eight rewards succeeded: a rate of 1/4, a third of the odds of 1/2. So q of 0.5 counts as 0.25."""
    past = PromptSuccess(PRIOR_REWARDS, 0.0)
    rule = gradient_rule([0.5] * 4, [], HALVES, PLAN, past=past)
    assert rule.strength == pytest.approx((0.875**4 - 0.625**4) / 0.25)
    assert gradient_rule([0.5] * 4, [], HALVES, PLAN).strength == pytest.approx(0, abs=1e-12)


def test_certain_variance_is_pruned_at_random_and_rare_success_is_steered():
    certain = survival([0.3, 0.7] * 16)
    assert certain == pytest.approx([0.5] * 32, abs=0.01)
    rare = survival([0.02] * 15 + [0.3], population_of([(0.02, 15.0), (0.3, 1.0)]))
    assert rare[-1] == PLAN.max_survival
    frequent = survival([0.98] * 15 + [0.7], population_of([(0.98, 15.0), (0.7, 1.0)]))
    assert frequent[-1] == PLAN.max_survival
    assert sum(rare) == sum(frequent) == pytest.approx(8, abs=1e-6)


def test_survivors_of_both_kinds_end_the_steering():
    """Kept candidates count already, pruned ones do not."""
    batch = [0.1, 0.1, 0.1, 0.4]
    population = population_of([(0.1, 3.0), (0.4, 1.0)])
    alone = gradient_rule(batch, [], population, PLAN).strength
    sure = [(0.99, True), (0.01, True), (0.99, False), (0.01, False)]
    assert 0 < gradient_rule(batch, sure, population, PLAN).strength < alone / 2
    assert gradient_rule(batch, [(0.0, True), (0.0, False)], population, PLAN).strength > 0


def test_siblings_to_come_count_as_the_population():
    few = gradient_rule([0.3, 0.3], [], population_of([(0.3, 1.0), (0.31, 1.0)]), PLAN)
    many = gradient_rule([0.3, 0.3], [], population_of([(0.3, 1.0), (0.31, 1.0)]), PLAN, num_to_come=200)
    assert few.strength > 1
    assert many.strength == pytest.approx(0, abs=1e-6)


probability = st.floats(0.0, 1.0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(probability, min_size=1, max_size=24),
    st.lists(st.tuples(probability, st.booleans()), max_size=8),
    st.lists(st.tuples(probability, st.floats(0.01, 100.0)), max_size=20),
    st.floats(0, 100).flatmap(lambda n: st.tuples(st.just(n), st.floats(0, n))),
    st.integers(0, 4096),
    st.sampled_from([0.05, 0.25, 0.5, 0.95]),
)
def test_survival_is_within_bounds_and_keeps_what_is_wanted(batch, earlier, points, past, num_to_come, keep):
    plan = replace(PLAN, keep_ratio=keep)
    population = population_of(points)
    rule = gradient_rule(batch, earlier, population, plan, past=PromptSuccess(*past), num_to_come=num_to_come)
    assert abs(rule.strength) <= MAX_SOLVED_STRENGTH
    survivals = [rule.survival(q) for q in batch]
    assert all(plan.min_survival <= p <= plan.max_survival for p in survivals)
    if len(batch) >= 4 and not earlier:
        assert sum(survivals) / len(batch) == pytest.approx(keep, abs=1e-6)

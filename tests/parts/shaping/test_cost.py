"""Eq. 4 of DARTS from a profile: hand-computed times, and the closed form against a loop over every step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.config import MIN_STEP_S
from vllm_rollout.parts.shaping.rules.cost import (
    MAX_SIMULATED_CANDIDATES,
    CostModel,
    PTLCurve,
    budget_slope,
    computed_prompt_tokens,
    rollout_time,
)

TENTHS = PTLCurve((1, 10), (0.1, 1.0))
"""A tenth of a second per candidate."""
PER_CANDIDATE = CostModel(((0, TENTHS),))
PER_CONTEXT_TOKEN = CostModel(((0, PTLCurve((1,), (1.0,))), (100, PTLCurve((1,), (2.0,)))))
"""1 s at context 0 and 0.01 s more per token of context, whatever the batch."""


def time_by_steps(lengths, cost, prompts, prefill_tokens=None):
    """Reference for `rollout_time`: one decode step at a time."""
    waiting = [[length, prompt, 0] for length, prompt in zip(lengths, prompts, strict=True) if length]
    running, seconds = [], 0.0
    while waiting or running:
        room = (cost.max_num_seqs or len(lengths)) - len(running)
        started, waiting = waiting[:room], waiting[room:]
        running += started
        seconds += cost.step_prefill_s * bool(started)
        context = sum(prompt + made for _, prompt, made in running) / len(running)
        seconds += cost.ptl(len(running), context)
        for candidate in running:
            candidate[2] += 1
        running = [candidate for candidate in running if candidate[2] < candidate[0]]
    tokens = sum(prompts) if prefill_tokens is None else prefill_tokens
    return seconds + tokens * cost.prefill_s_per_token


seconds = st.floats(1e-4, 10)


@st.composite
def curves(draw):
    sizes = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=4)))
    return PTLCurve(tuple(sizes), tuple(draw(seconds) for _ in sizes))


@st.composite
def costs(draw):
    contexts = sorted(draw(st.sets(st.integers(0, 300), min_size=1, max_size=3)))
    return CostModel(
        tuple((context, draw(curves())) for context in contexts),
        draw(st.floats(0, 1e-2)),
        draw(st.floats(0, 1)),
        draw(st.none() | st.integers(1, 12)),
    )


def test_a_curve_is_linear_between_its_knots_and_goes_on_beyond_them():
    curve = PTLCurve((2, 4, 8), (1.0, 2.0, 3.0))
    assert [curve(size) for size in (2, 3, 4, 6, 8)] == [1.0, 1.5, 2.0, 2.5, 3.0]
    assert curve(1) == 0.5
    assert curve(12) == 4.0


def test_a_curve_does_not_fall_to_the_right_of_its_knots_nor_below_the_floor():
    assert PTLCurve((1, 2), (2.0, 1.0))(3) == 1.0
    assert PTLCurve((10, 11), (1.0, 2.0))(1) == MIN_STEP_S
    assert {PTLCurve((4,), (0.5,))(size) for size in (1, 4, 99)} == {0.5}


@pytest.mark.parametrize(
    ("sizes", "times", "complaint"),
    [
        ((), (), "at least one batch size"),
        ((1, 2), (1.0,), "2 batch sizes and 1 times"),
        ((2, 1), (1.0, 1.0), "must ascend"),
        ((1, 1), (1.0, 1.0), "must ascend"),
        ((0, 1), (1.0, 1.0), "positive"),
        ((1, 2), (1.0, -1.0), "positive"),
        ((1, 2), (1.0, math.nan), "positive"),
        ((1, math.inf), (1.0, 2.0), "positive"),
    ],
)
def test_a_curve_that_cannot_be_is_refused(sizes, times, complaint):
    with pytest.raises(ValueError, match=complaint):
        PTLCurve(sizes, times)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"curves": ()}, r"needs curves .* got contexts \[\]"),
        ({"curves": ((5, TENTHS), (5, TENTHS))}, "must ascend"),
        ({"curves": ((-1, TENTHS),)}, "contexts of 0 tokens or more"),
        ({"curves": ((0, TENTHS),), "prefill_s_per_token": -1.0}, "prefill_s_per_token must be .* got -1.0"),
        ({"curves": ((0, TENTHS),), "step_prefill_s": math.nan}, "step_prefill_s must be .* got nan"),
        ({"curves": ((0, TENTHS),), "max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
    ],
)
def test_a_cost_model_that_cannot_be_is_refused(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        CostModel(**arguments)


def test_ptl_is_linear_between_contexts_and_goes_on_beyond_them():
    assert [PER_CONTEXT_TOKEN.ptl(1, context) for context in (0, 50, 100, 300)] == [1.0, 1.5, 2.0, 4.0]
    later = CostModel(((100, PTLCurve((1,), (2.0,))), (200, PTLCurve((1,), (3.0,)))))
    assert later.ptl(1, 0) == 1.0


def test_a_step_does_not_get_quicker_with_contexts_that_were_not_measured():
    falling = CostModel(((100, PTLCurve((1,), (2.0,))), (200, PTLCurve((1,), (1.0,)))))
    assert falling.ptl(1, 150) == 1.5
    assert falling.ptl(1, 1000) == 1.0
    assert falling.ptl(1, 0) == 2.0


def test_eq_4_by_hand():
    # Three run 2 steps (0.3 s each), two 1 step (0.2 s), one 4 steps (0.1 s): whatever their order.
    assert rollout_time([2, 3, 7], PER_CANDIDATE) == pytest.approx(2 * 0.3 + 0.2 + 4 * 0.1)
    assert rollout_time([7, 2, 3], PER_CANDIDATE) == rollout_time([2, 3, 7], PER_CANDIDATE)


@given(
    costs(), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 200)), max_size=12), st.none() | st.integers(0, 99)
)
def test_the_closed_form_is_the_sum_over_steps(cost, candidates, prefill_tokens):
    lengths, prompts = [length for length, _ in candidates], [prompt for _, prompt in candidates]
    expected = time_by_steps(lengths, cost, prompts, prefill_tokens)
    assert rollout_time(lengths, cost, prompts, prefill_tokens) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(costs(), st.floats(1, 64), st.floats(0, 400), st.integers(0, 300))
def test_decode_time_is_the_sum_over_steps(cost, batch_size, context, num_steps):
    expected = sum(cost.ptl(batch_size, context + i) for i in range(num_steps))
    assert cost.decode_time(batch_size, context, num_steps) == pytest.approx(expected, rel=1e-9)


def test_siblings_share_the_full_blocks_of_their_prompt():
    assert computed_prompt_tokens(100, 1, 32) == 100
    assert computed_prompt_tokens(100, 3, 32) == 100 + 2 * 4
    assert computed_prompt_tokens(96, 3, 32) == 96 + 2 * 32  # the last token is always computed, and its block with it
    assert computed_prompt_tokens(97, 2, 32) == 98
    assert computed_prompt_tokens(0, 4, 32) == computed_prompt_tokens(10, 0, 32) == 0


def test_the_slope_of_a_budget_of_equal_lengths_by_hand():
    # All have 50 tokens: a budget of M takes 50 steps of M / 10 s.
    slope = budget_slope(PER_CANDIDATE, 50, 0, lower=4, upper=8)
    assert slope.base_s == pytest.approx(50 * 0.4)
    assert slope.seconds_per_candidate == pytest.approx(50 * 0.1)
    assert budget_slope(PER_CANDIDATE, 50, 0, 8, 8).seconds_per_candidate == pytest.approx(5.0)


def test_the_slope_is_the_secant_between_the_budgets():
    cost = CostModel(((0, PTLCurve((1, 8, 32), (0.1, 0.15, 0.5))),), max_num_seqs=16)
    whole = budget_slope(cost, 200, 150, 8, 32)
    first, second = budget_slope(cost, 200, 150, 8, 16), budget_slope(cost, 200, 150, 16, 32)
    assert whole.base_s == first.base_s
    assert first.base_s + 8 * first.seconds_per_candidate == pytest.approx(second.base_s)
    assert 24 * whole.seconds_per_candidate == pytest.approx(
        8 * first.seconds_per_candidate + 16 * second.seconds_per_candidate
    )


def test_ranks_share_a_budget():
    one = budget_slope(PER_CANDIDATE, 50, 20, 16, 32, num_ranks=1)
    two = budget_slope(PER_CANDIDATE, 50, 20, 32, 64, num_ranks=2)
    assert two.base_s == pytest.approx(one.base_s)
    assert two.seconds_per_candidate == pytest.approx(one.seconds_per_candidate / 2)


def test_budgets_between_multiples_of_the_ranks_lie_between_theirs():
    times = [budget_slope(PER_CANDIDATE, 50, 20, budget, budget + 4, num_ranks=4).base_s for budget in range(8, 13)]
    assert times == sorted(times)
    assert times[2] == pytest.approx((times[0] + times[4]) / 2)


def test_quantiles_have_the_mean_of_the_lengths():
    steps = CostModel(((0, PTLCurve((1,), (1.0,))),), max_num_seqs=1)  # one after the other: seconds are tokens
    assert budget_slope(steps, 300, 200, 1000, 2000).base_s == pytest.approx(300_000, rel=0.01)


def test_lengths_are_cut_at_max_tokens():
    steps = CostModel(((0, PTLCurve((1,), (1.0,))),))  # the longest one: seconds are its tokens
    assert budget_slope(steps, 300, 300, 500, 501, max_tokens=512).base_s == pytest.approx(512)


@pytest.mark.parametrize("max_num_seqs", [None, 64])
def test_budgets_beyond_what_is_followed_one_by_one_go_on_evenly(max_num_seqs):
    cost = CostModel(((0, PTLCurve((1, 64), (0.01, 0.1))),), 1e-4, 0.01, max_num_seqs)
    limit = MAX_SIMULATED_CANDIDATES
    before = budget_slope(cost, 100, 80, limit - 512, limit, prompt_tokens=50)
    after = budget_slope(cost, 100, 80, limit, 4 * limit, prompt_tokens=50)
    assert after.seconds_per_candidate == pytest.approx(before.seconds_per_candidate, rel=0.02)

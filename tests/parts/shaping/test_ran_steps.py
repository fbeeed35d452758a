"""Estimates of step times against known times: a constant for each step, and an amount for each candidate."""

from itertools import accumulate
from random import Random

import pytest

from tests.parts.page.test_receipt import drawn
from vllm_rollout.parts.page.rules.receipt import RanGroup, receipt_of
from vllm_rollout.parts.shaping.rules.ran_steps import RanCandidates, StepCost, bubble, step_cost, tail_step_s

GROUP_SIZE, MAX_TOKENS = 8, 2048


def played(lengths, cost, *, races):
    """All groups at once, a token of everybody per step."""
    stops = [sorted(its)[GROUP_SIZE - 1] if races else MAX_TOKENS for its in lengths]
    cut = [[min(num, stop, MAX_TOKENS) for num in its] for its, stop in zip(lengths, stops, strict=True)]
    running = [sum(num > step for its in cut for num in its) for step in range(max(map(max, cut)))]
    at = list(accumulate((cost.own_s + cost.candidate_s * num for num in running), initial=0.0))
    groups = []
    for its, tokens, stop in zip(lengths, cut, stops, strict=True):
        ends = ["surplus" if num > stop else "length" if num >= MAX_TOKENS else "stop" for num in its]
        timed = {"started_s": 0.0, "ended_s": [at[num] for num in tokens]}
        groups.append(RanGroup(tokens, ends, range(GROUP_SIZE), GROUP_SIZE, MAX_TOKENS, **timed))
    return groups, at[-1]


def ran(groups):
    return [RanCandidates(its.started_s, its.ended_s, its.tokens) for its in groups]


@pytest.mark.parametrize(
    "cost", [StepCost(0.01, 0.0), StepCost(0.01, 2e-5), StepCost(0.01, 1e-4), StepCost(0.002, 1e-4)]
)
def test_the_cost_of_a_step_is_found_in_a_race(cost):
    lengths = [[max(1, num // 4) for num in its] for its in drawn(Random(3), 32, 16, 0.9)]
    groups, _ = played(lengths, cost, races=True)
    found = step_cost(ran(groups), tail_step_s(ran(groups)))
    assert found.own_s == pytest.approx(cost.own_s, rel=0.3, abs=0.001)
    assert found.candidate_s == pytest.approx(cost.candidate_s, rel=0.2, abs=1e-9)


@pytest.mark.parametrize("sigma", [0.9, 1.3])
@pytest.mark.parametrize("cost", [StepCost(0.01, 0.0), StepCost(0.01, 2e-5), StepCost(0.01, 1e-4)])
def test_waiting_is_predicted_where_steps_get_shorter_as_candidates_end(cost, sigma):
    errors = []
    for seed in range(6):
        lengths = [[max(1, num // 4) for num in its] for its in drawn(Random(seed), 32, 16, sigma)]
        raced, seconds = played(lengths, cost, races=True)
        _, truth = played(lengths, cost, races=False)
        errors.append(receipt_of(raced, seconds).waiting_seconds / truth - 1)
    assert abs(sum(errors) / len(errors)) < 0.06
    assert max(map(abs, errors)) < 0.15


def test_where_more_candidates_do_not_take_longer_a_step_is_one_of_the_tail():
    faster = [RanCandidates(0.0, [10.0, 11.0, 12.0, 20.0], [4, 5, 6, 8]), RanCandidates(0.0, [1.0, 2.0], [1, 3])]
    assert step_cost(faster, 7.0) == StepCost(7.0, 0.0)
    assert step_cost([RanCandidates(0.0, [1.0], [5])], 7.0) == StepCost(7.0, 0.0)


def test_a_step_costs_nothing_less_than_nothing():
    """Steps that shorten faster than candidates end: all of it is theirs."""
    groups = [RanCandidates(0.0, [4.0, 8.0, 9.0, 9.1], [10, 20, 30, 40])]
    found = step_cost(groups, 0.1)
    assert found.own_s == pytest.approx(0.0, abs=1e-12)
    assert found.candidate_s > 0


def test_what_stood_empty_is_counted():
    groups = [RanCandidates(0.0, [2.0, 4.0], [2, 4]), RanCandidates(2.0, [4.0], [2])]
    assert bubble(groups, 4.0) == pytest.approx(1 - 8 / 8)
    assert bubble(groups, 8.0) == pytest.approx(0.5)
    assert bubble([], 1.0) == 0.0

"""Dual-end selection with patience: when the wait for the longest ends."""

from math import ceil

import pytest
from group_steps import end_step, launched, states
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.group.plans.plan import GroupPlan
from vllm_rollout.group.racing.lifecycle import NOTHING
from vllm_rollout.group.racing.selection import conclude
from vllm_rollout.group.types import Ending

few_examples = settings(max_examples=80, deadline=None, database=None)


def test_no_length_is_too_long_before_group_size_valid_candidates_have_finished():
    group = launched(2, 5, False, patience=1.5)
    end_step(group, (0, "stop", 10))
    end_step(group, (1, "length", 20))
    end_step(group, (2, "failed", 21))
    assert group.length_cap is None


def test_the_cap_is_patience_times_the_longest_of_the_first_group_size():
    group = launched(2, 5, False, patience=1.5)
    end_step(group, (0, "stop", 10))
    assert end_step(group, (1, "stop", 15)) == NOTHING
    assert group.length_cap == 23
    assert group.running == [2, 3, 4]


def test_of_a_tie_in_the_step_that_sets_the_cap_the_shorter_counts():
    group = launched(1, 3, False, patience=2)
    end_step(group, (0, "stop", 12), (1, "stop", 9))
    assert group.length_cap == 18


def test_a_candidate_that_ends_before_the_cap_does_not_move_it():
    group = launched(1, 3, False, patience=2)
    end_step(group, (0, "stop", 10))
    end_step(group, (1, "stop", 19))
    assert group.length_cap == 20


def test_candidates_given_up_are_surplus_and_the_group_is_over():
    group = launched(1, 3, False, patience=2)
    end_step(group, (0, "stop", 10))
    group.too_long({1: 19, 2: 20})
    assert states(group) == ["finished", "running", "surplus"]
    assert not group.over
    group.too_long({1: 20})
    assert group.over


def test_no_verdict_is_given_on_a_candidate_that_has_ended():
    group = launched(1, 2, False, patience=2)
    end_step(group, (0, "stop", 10))
    with pytest.raises(AssertionError, match="after its end"):
        group.too_long({0: 20})


def test_without_patience_there_is_no_cap():
    group = launched(1, 3, False)
    end_step(group, (0, "stop", 10))
    assert group.length_cap is None


def run(lengths: list[int], group_size: int, patience: float | None) -> list[Ending]:
    """All candidates at once, a token per step, until every one has ended or was given up."""
    group = launched(group_size, len(lengths), False, patience=patience)
    endings = {}
    for step in range(1, max(lengths) + 1):
        for index in [i for i in group.running if lengths[i] == step]:
            group.end(index, "stop", step)
            endings[index] = Ending(index, "finished", step, end_step=step)
        group.settle()
        if group.length_cap is not None:
            rest = group.too_long(dict.fromkeys(group.running, step))
            endings |= {index: Ending(index, "surplus", step, end_step=step) for index in rest}
    assert group.over
    return [endings[index] for index in sorted(endings)]


pools = st.lists(st.integers(1, 60), min_size=1, max_size=9)


@few_examples
@given(pools, st.data())
def test_the_shortest_are_those_of_the_whole_pool_whatever_the_patience(pool, data):
    size = data.draw(st.integers(1, len(pool)))
    num_longest = data.draw(st.integers(0, size))
    plan = GroupPlan(size, len(pool) - size, False, "dual_end", num_longest)
    patience = data.draw(st.floats(1, 3))
    plain, patient = conclude(plan, run(pool, size, None)), conclude(plan, run(pool, size, patience))
    assert patient.status == "complete"

    def shortest(result):
        chosen = sorted((result.endings[i].num_tokens, i) for i in result.selected)
        return chosen[: size - num_longest]

    assert shortest(patient) == shortest(plain)


@few_examples
@given(pools, st.data())
def test_the_longest_are_the_longest_up_to_the_cap(pool, data):
    size = data.draw(st.integers(1, len(pool)))
    patience = data.draw(st.floats(1, 3))
    cap = max(sorted(pool)[size - 1], ceil(patience * sorted(pool)[size - 1]))
    plan = GroupPlan(size, len(pool) - size, False, "dual_end", num_longest=1)
    result = conclude(plan, run(pool, size, patience))
    assert max(result.endings[i].num_tokens for i in result.selected) == max(n for n in pool if n <= cap)
    assert max(ending.num_tokens for ending in result.endings) <= cap


@few_examples
@given(pools, st.data())
def test_more_patience_never_returns_shorter_answers(pool, data):
    size = data.draw(st.integers(1, len(pool)))
    plan = GroupPlan(size, len(pool) - size, False, "dual_end", num_longest=1)
    totals = []
    for patience in (1.0, 1.5, 2.0, 1000.0, None):
        result = conclude(plan, run(pool, size, patience))
        totals.append(sum(result.endings[i].num_tokens for i in result.selected))
    assert totals == sorted(totals)
    assert totals[-1] == totals[-2]

"""Group: one test per rule, then the same rules over random races."""

import itertools
import random
from typing import NamedTuple

import pytest
from group_steps import end_step, launched, states
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.group.plans.terms import GroupTerms
from vllm_rollout.group.racing.lifecycle import NOTHING, Group, Settlement
from vllm_rollout.group.types import EndReason

END_STATES = {"finished", "surplus", "failed"}


def test_the_others_are_stopped_in_the_step_in_which_enough_have_finished():
    group = launched(group_size=2, num_candidates=4)
    assert end_step(group, (3, "stop", 10)) == NOTHING
    assert end_step(group, (0, "stop", 11)) == Settlement(stop=(1, 2))
    assert states(group) == ["finished", "surplus", "surplus", "finished"]
    assert group.closed
    assert group.over


def test_nothing_is_stopped_before_enough_have_finished():
    group = launched(group_size=3, num_candidates=5)
    assert end_step(group, (0, "stop", 1), (1, "stop", 1)) == NOTHING
    assert not group.closed
    assert group.num_running == 3


@pytest.mark.parametrize("order", itertools.permutations(range(4)))
def test_ties_go_to_the_shortest_then_to_the_lowest_index_whatever_the_order_of_ends(order):
    ends = [(0, "stop", 9), (1, "stop", 5), (2, "stop", 5), (3, "stop", 5)]
    group = launched(group_size=2, num_candidates=5)
    assert end_step(group, *[ends[i] for i in order]) == Settlement(stop=(4,), lost_ties=(0, 3))
    assert states(group) == ["surplus", "finished", "finished", "surplus", "surplus"]


def test_an_earlier_step_beats_a_shorter_length():
    group = launched(group_size=2, num_candidates=3)
    end_step(group, (2, "stop", 50))
    assert end_step(group, (0, "stop", 5), (1, "stop", 4)).lost_ties == (0,)
    assert states(group) == ["surplus", "finished", "finished"]


def test_a_truncated_candidate_does_not_count_while_enough_others_are_left():
    group = launched(group_size=1, num_candidates=3)
    assert end_step(group, (0, "length", 8)) == NOTHING
    assert end_step(group, (1, "length", 8)) == NOTHING
    assert end_step(group, (2, "stop", 8)) == Settlement()
    assert group.closed


def test_a_truncated_candidate_that_ends_with_the_last_winner_is_surplus():
    group = launched(group_size=1, num_candidates=3)
    assert end_step(group, (0, "length", 8), (1, "stop", 9)) == Settlement(stop=(2,), lost_ties=(0,))


def test_truncated_candidates_fill_the_group_when_nobody_else_is_left():
    group = launched(group_size=2, num_candidates=3)
    assert end_step(group, (0, "length", 8)) == NOTHING
    assert end_step(group, (2, "failed", 3)) == NOTHING
    assert not group.closed
    assert end_step(group, (1, "length", 8)) == NOTHING
    assert group.closed
    assert states(group) == ["finished", "finished", "failed"]


def test_a_truncated_candidate_waits_for_siblings_that_have_not_arrived():
    group = Group(GroupTerms(2, 3))
    group.launch()
    group.launch()
    end_step(group, (0, "stop", 4), (1, "length", 8))
    assert not group.closed
    group.launch()
    end_step(group, (2, "stop", 6))
    assert group.closed
    assert states(group) == ["finished", "finished", "finished"]


def test_a_candidate_that_ended_by_itself_is_preferred_to_an_earlier_truncated_one():
    group = launched(group_size=1, num_candidates=2)
    end_step(group, (0, "length", 3))
    assert end_step(group, (1, "stop", 8)).lost_ties == ()
    assert group.state(1) == "finished"


def test_a_failed_candidate_does_not_fail_the_group():
    group = launched(group_size=2, num_candidates=4)
    end_step(group, (0, "failed", 0))
    assert end_step(group, (1, "stop", 3), (2, "stop", 3)) == Settlement(stop=(3,))
    assert states(group) == ["failed", "finished", "finished", "surplus"]


def test_a_failed_candidate_never_counts():
    group = launched(group_size=2, num_candidates=2)
    assert end_step(group, (0, "failed", 1), (1, "stop", 1)) == NOTHING
    assert not group.closed
    assert group.over


def test_a_sibling_that_comes_after_the_end_is_given_up():
    group = Group(GroupTerms(1, 3))
    group.launch()
    end_step(group, (0, "stop", 2))
    assert group.closed
    assert not group.over
    assert group.launch() == 1
    assert group.settle() == Settlement(stop=(1,))
    group.launch()
    assert end_step(group, (2, "stop", 1)) == Settlement(lost_ties=(2,))
    assert states(group) == ["finished", "surplus", "surplus"]
    assert group.over


def test_a_late_sibling_that_failed_stays_failed():
    group = Group(GroupTerms(1, 2))
    group.launch()
    end_step(group, (0, "stop", 2))
    group.launch()
    assert end_step(group, (1, "failed", 0)) == NOTHING
    assert group.state(1) == "failed"


def test_the_engine_ending_a_stopped_candidate_changes_nothing():
    group = launched(group_size=1, num_candidates=2)
    assert end_step(group, (0, "stop", 2)).stop == (1,)
    assert end_step(group, (1, "failed", 2)) == NOTHING
    assert group.state(1) == "surplus"
    assert group.num_running == 0


def test_without_early_stop_no_verdict_is_given():
    group = launched(group_size=1, num_candidates=3, early_stop=False)
    assert end_step(group, (0, "stop", 1), (1, "stop", 1)) == NOTHING
    assert end_step(group, (2, "length", 9)) == NOTHING
    assert states(group) == ["finished"] * 3
    assert group.over


def test_candidates_are_numbered_by_arrival_unless_they_name_their_index():
    group = Group(GroupTerms(2, 2))
    assert [group.launch(), group.launch()] == [0, 1]
    assert [Group(GroupTerms(2, 4)).launch(3), Group(GroupTerms(2, 4)).launch(0)] == [3, 0]


def test_launching_an_index_twice_is_our_mistake():
    group = Group(GroupTerms(1, 2))
    group.launch(0)
    with pytest.raises(AssertionError, match="candidate 0 launched twice"):
        group.launch(0)


def test_settling_without_events_decides_nothing():
    group = launched(group_size=1, num_candidates=2)
    assert group.settle() == NOTHING
    assert group.num_running == 2


class Life(NamedTuple):
    """What one candidate would do if nobody stopped it."""

    launch_step: int
    end_step: int
    reason: EndReason
    num_tokens: int


class Race(NamedTuple):
    group: Group
    settlements: list[Settlement]
    ended_by_itself: list[set[int]]
    """Per step."""


def play(group_size: int, lives: list[Life], early_stop: bool = True, order: int = 0) -> Race:
    """Run a race as the scheduler does; `order` seeds the order of launches and ends within a step."""
    shuffled = random.Random(order)
    group = Group(GroupTerms(group_size, len(lives), early_stop))
    settlements, ended_by_itself = [], []
    running: set[int] = set()
    for step in range(max(life.end_step for life in lives) + 1):
        arrivals = [i for i, life in enumerate(lives) if life.launch_step == step]
        shuffled.shuffle(arrivals)
        for index in arrivals:
            group.launch(index)
        running.update(arrivals)
        ends = [i for i in sorted(running) if lives[i].end_step == step]
        shuffled.shuffle(ends)
        for index in ends:
            group.end(index, lives[index].reason, lives[index].num_tokens)
        settlement = group.settle()
        for index in settlement.stop:
            group.end(index, "failed", 0)  # the engine reports what it aborted for us
        running -= {*ends, *settlement.stop}
        settlements.append(settlement)
        ended_by_itself.append(set(ends))
    return Race(group, settlements, ended_by_itself)


lives = st.builds(
    lambda launch_step, duration, reason, num_tokens: Life(launch_step, launch_step + duration, reason, num_tokens),
    st.integers(0, 2),
    st.integers(0, 3),
    st.sampled_from(["stop", "stop", "stop", "length", "failed"]),
    st.integers(1, 3),
)
races = st.lists(lives, min_size=1, max_size=7).flatmap(
    lambda pool: st.tuples(st.integers(1, len(pool)), st.just(pool))
)
few_examples = settings(max_examples=60, deadline=None, database=None)


@few_examples
@given(races)
def test_every_candidate_reaches_one_end_state_and_gets_at_most_one_verdict(race):
    group, settlements, ended_by_itself = play(*race)
    assert len(group._candidates) == len(race[1])
    assert set(states(group)) <= END_STATES
    assert group.over
    verdicts = [index for settlement in settlements for index in settlement.stop + settlement.lost_ties]
    assert len(verdicts) == len(set(verdicts))
    assert {i for i, state in enumerate(states(group)) if state == "surplus"} == set(verdicts)
    ended_before: set[int] = set()
    for step, (settlement, ended) in enumerate(zip(settlements, ended_by_itself, strict=True)):
        assert ended_before.isdisjoint(settlement.stop + settlement.lost_ties)
        assert ended.isdisjoint(settlement.stop)
        assert ended.issuperset(settlement.lost_ties)
        assert all(race[1][index].launch_step <= step for index in settlement.stop)
        ended_before |= ended | set(settlement.stop)


@few_examples
@given(races)
def test_the_winners_are_the_first_that_end_by_themselves(race):
    group_size, pool = race
    group = play(*race).group
    valid = [i for i, life in enumerate(pool) if life.reason == "stop"]
    finished = [i for i in valid if group.state(i) == "finished"]
    if len(valid) < group_size:
        assert len(finished) <= len(valid)
        return
    ranking = sorted(valid, key=lambda i: (pool[i].end_step, pool[i].num_tokens, i))
    assert finished == sorted(ranking[:group_size])


@few_examples
@given(races, st.integers(1, 1000))
def test_the_order_of_events_within_a_step_does_not_matter(race, order):
    one, other = play(*race), play(*race, order=order)
    assert states(one.group) == states(other.group)
    by_value = [(set(s.stop), s.lost_ties) for s in one.settlements]
    assert by_value == [(set(s.stop), s.lost_ties) for s in other.settlements]


@few_examples
@given(races)
def test_truncated_candidates_end_a_race_only_when_too_few_others_are_left(race):
    group_size, pool = race
    settlements = play(*race).settlements
    closing = next((step for step, settlement in enumerate(settlements) if settlement.stop), None)
    if closing is None:
        return
    num_valid = sum(life.reason == "stop" and life.end_step <= closing for life in pool)
    num_failed = sum(life.reason == "failed" and life.end_step <= closing for life in pool)
    num_truncated = sum(life.reason == "length" and life.end_step <= closing for life in pool)
    assert num_valid >= group_size or len(pool) - num_failed - num_truncated < group_size
    assert num_valid + num_truncated >= group_size


@few_examples
@given(races)
def test_without_early_stop_everybody_runs_to_the_end(race):
    group, settlements, _ = play(*race, early_stop=False)
    assert set(settlements) == {NOTHING}
    assert states(group) == ["failed" if life.reason == "failed" else "finished" for life in race[1]]


@few_examples
@given(st.lists(lives, min_size=1, max_size=7))
def test_without_redundancy_nobody_is_stopped(pool):
    assert set(play(len(pool), pool).settlements) == {NOTHING}

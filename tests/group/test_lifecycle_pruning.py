"""Group with prune verdicts: one test per rule, then the same rules over random races."""

import random
from typing import NamedTuple

import pytest
from group_steps import end_step, launched, states
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.group.plans.terms import GroupTerms
from vllm_rollout.group.racing.lifecycle import NOTHING, Group, Settlement
from vllm_rollout.group.types import Assessment, Confidence, EndReason

END_STATES = {"finished", "surplus", "failed", "pruned"}


def assessment(keep: bool) -> Assessment:
    return Assessment("head", 0.0, 0.5, 0.5, keep, 1, Confidence(1.0, 1.0, 1.0))


def test_a_pruned_candidate_is_out_of_the_race():
    group = launched(group_size=2, num_candidates=4)
    group.prune([1, 3])
    assert group.settle() == NOTHING
    assert group.num_running == 2
    assert end_step(group, (0, "stop", 5), (2, "stop", 5)) == NOTHING
    assert states(group) == ["finished", "pruned", "finished", "pruned"]
    assert group.closed
    assert group.over


def test_the_engine_ending_a_pruned_candidate_changes_nothing():
    group = launched(group_size=1, num_candidates=3)
    group.prune([0])
    assert end_step(group, (0, "failed", 3)) == NOTHING
    assert group.state(0) == "pruned"
    assert group.num_running == 2


@pytest.mark.parametrize("reason", ["stop", "length", "failed"])
def test_a_verdict_after_the_end_is_our_mistake(reason):
    group = launched(group_size=1, num_candidates=3, early_stop=False)
    end_step(group, (0, reason, 3))
    with pytest.raises(AssertionError, match="verdict on candidate 0 after its end"):
        group.prune([0])
    group.prune([1])
    with pytest.raises(AssertionError, match="verdict on candidate 1 after its end"):
        group.prune([1])


def test_pruning_that_makes_truncated_candidates_count_closes_the_group():
    group = launched(group_size=2, num_candidates=5)
    assert end_step(group, (0, "length", 9), (1, "stop", 5)) == NOTHING
    group.prune([2, 3])
    assert group.settle() == NOTHING  # 1 and 4 may still be two that end by themselves
    group.prune([4])
    assert group.settle() == NOTHING
    assert group.closed
    assert states(group) == ["finished", "finished", "pruned", "pruned", "pruned"]


def test_truncated_candidates_of_the_step_in_which_pruning_closes_the_group_tie():
    group = launched(group_size=1, num_candidates=4)
    assert end_step(group, (0, "length", 8), (1, "length", 8), (2, "failed", 8)) == NOTHING
    group.prune([3])
    assert group.settle() == Settlement(lost_ties=(1,))
    assert states(group) == ["finished", "surplus", "failed", "pruned"]


def test_only_candidates_of_that_step_tie():
    group = launched(group_size=1, num_candidates=3)
    end_step(group, (1, "length", 8))
    end_step(group, (0, "length", 9))
    group.prune([2])
    assert group.settle() == Settlement(lost_ties=(0,))
    assert states(group) == ["surplus", "finished", "pruned"]


@pytest.mark.parametrize(
    ("num_due", "at_least", "num_needed"), [(4, 2, 0), (6, 2, 2), (6, 1, 1), (5, 2, 1), (6, 6, 6), (1, 6, 1), (0, 6, 0)]
)
def test_due_candidates_are_needed_as_far_as_the_others_are_too_few(num_due, at_least, num_needed):
    assert launched(2, 6).num_needed(num_due, at_least) == num_needed


def test_finished_and_expected_siblings_are_able_to_finish_while_failed_and_pruned_ones_are_not():
    group = Group(GroupTerms(2, 6))
    for _ in range(5):
        group.launch()
    assert group.num_needed(5, 2) == 1  # the sixth is expected
    end_step(group, (0, "stop", 3))
    assert group.num_needed(4, 2) == 0
    end_step(group, (1, "failed", 3))
    assert group.num_needed(3, 2) == 0
    group.launch()
    assert group.num_needed(4, 2) == 1
    group.prune([2, 3])
    assert group.num_needed(2, 2) == 1
    assert group.num_needed(1, 2) == 0


def test_in_shadow_mode_marked_candidates_do_not_count_as_able_to_finish():
    group = launched(group_size=2, num_candidates=4)
    group.assessments.update({0: assessment(keep=False), 1: assessment(keep=False)})
    assert group.num_needed(2, 2) == 2
    end_step(group, (0, "stop", 20))
    assert group.num_needed(2, 2) == 2
    group.assessments[1] = assessment(keep=True)
    assert group.num_needed(2, 2) == 1


class Life(NamedTuple):
    """What one candidate would do if nobody stopped it."""

    launch_step: int
    detection_step: int
    end_step: int
    reason: EndReason
    num_tokens: int
    unlucky: bool
    """Its score stops it, if the floor lets it."""


class Play(NamedTuple):
    group: Group
    settlements: list[Settlement]
    pruned: list[int]
    ended: list[int]
    """By themselves, truncated, or failed."""
    num_able: list[int]
    """After each step with a prune verdict: candidates that are running, finished or still to come."""


def play(group_size: int, lives: list[Life], *, floor: int, early_stop: bool = True, order: int = 0) -> Play:
    """Run a race as the scheduler does; `order` seeds the order of events within a step.

    A candidate that ends in its detection step is not judged: it has ended.
    """
    shuffled = random.Random(order)
    group = Group(GroupTerms(group_size, len(lives), early_stop))
    settlements: list[Settlement] = []
    pruned: list[int] = []
    ended: list[int] = []
    num_able: list[int] = []
    running: set[int] = set()

    def settle() -> None:
        settlement = group.settle()
        settlements.append(settlement)
        running.difference_update(settlement.stop)
        for index in settlement.stop:
            group.end(index, "failed", 0)  # the engine reports what it aborted for us

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
        ended += ends
        running.difference_update(ends)
        settle()
        due = [i for i in sorted(running) if lives[i].detection_step == step]
        if not due or group.closed:
            continue
        num_needed = group.num_needed(len(due), floor)
        unlucky = [i for i in due if lives[i].unlucky][: len(due) - num_needed]
        if not unlucky:
            continue
        group.prune(unlucky)
        for index in unlucky:
            group.end(index, "failed", 0)
        pruned += unlucky
        running.difference_update(unlucky)
        num_to_come = sum(life.launch_step > step for life in lives)
        num_able.append(num_to_come + sum(state in ("running", "finished") for state in states(group)))
        settle()
    return Play(group, settlements, pruned, ended, num_able)


lives = st.builds(
    lambda launch, detection, rest, reason, num_tokens, unlucky: Life(
        launch, launch + detection, launch + detection + rest, reason, num_tokens, unlucky
    ),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 3),
    st.sampled_from(["stop", "stop", "stop", "length", "failed"]),
    st.integers(1, 3),
    st.booleans(),
)
races = st.lists(lives, min_size=1, max_size=7).flatmap(
    lambda pool: st.tuples(st.integers(1, len(pool)), st.just(pool))
)
few_examples = settings(max_examples=60, deadline=None, database=None)


@few_examples
@given(races, st.booleans(), st.booleans())
def test_every_candidate_reaches_one_end_state_by_one_verdict_at_most(race, allow_fewer, early_stop):
    group_size, pool = race
    group, settlements, pruned, ended, _ = play(*race, floor=1 if allow_fewer else group_size, early_stop=early_stop)
    assert len(group._candidates) == len(pool)
    assert set(states(group)) <= END_STATES
    assert group.over
    stopped = [index for settlement in settlements for index in settlement.stop]
    lost = [index for settlement in settlements for index in settlement.lost_ties]
    ways_out = [*stopped, *pruned, *ended]
    assert sorted(ways_out) == list(range(len(pool)))
    assert set(lost) <= set(ended)
    assert len(lost) == len(set(lost))
    for index, state in enumerate(states(group)):
        assert (state == "pruned") == (index in pruned)
        assert (state == "surplus") == (index in stopped or index in lost)
        assert (state == "failed") == (index in ended and pool[index].reason == "failed")
    assert early_stop or not (stopped or lost)


@few_examples
@given(races, st.integers(0, 1000))
def test_pruning_leaves_group_size_candidates_able_to_finish_or_touches_nobody(race, order):
    group_size, _ = race
    outcome = play(*race, floor=group_size, order=order)
    assert all(num >= group_size for num in outcome.num_able)
    if all(life.reason != "failed" for life in race[1]):
        assert states(outcome.group).count("finished") >= group_size


@few_examples
@given(races)
def test_with_allow_fewer_pruning_leaves_at_least_one(race):
    outcome = play(*race, floor=1)
    assert all(num >= 1 for num in outcome.num_able)
    if all(life.reason != "failed" for life in race[1]):
        assert "finished" in states(outcome.group)


@few_examples
@given(races, st.booleans())
def test_a_group_closes_exactly_when_enough_candidates_have_finished(race, allow_fewer):
    group_size, pool = race
    group = play(*race, floor=1 if allow_fewer else group_size).group
    assert group.closed == (states(group).count("finished") >= group_size)
    if group.closed:
        by_itself = sum(state == "finished" and pool[i].reason == "stop" for i, state in enumerate(states(group)))
        assert by_itself <= group_size


@few_examples
@given(races, st.integers(1, 1000))
def test_the_order_of_events_within_a_step_does_not_matter_to_verdicts(race, order):
    group_size, _ = race
    one, other = play(*race, floor=group_size), play(*race, floor=group_size, order=order)
    assert states(one.group) == states(other.group)
    assert one.pruned == other.pruned


@few_examples
@given(races)
def test_candidates_that_nobody_marks_race_as_without_pruning(race):
    group_size, pool = race
    lucky = [life._replace(unlucky=False) for life in pool]
    never_due = [life._replace(detection_step=-1) for life in pool]
    one, other = play(group_size, lucky, floor=group_size), play(group_size, never_due, floor=group_size)
    assert states(one.group) == states(other.group)
    assert one.settlements == other.settlements

"""Group: one case per rule, then the same rules over random races, with and without prune verdicts and patience."""

import random
from math import ceil
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel.rules.group_steps import end_step, launched, play_steps, states
from vllm_rollout.kernel.rules.lifecycle import NOTHING, Group, Settlement
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.selection import conclude
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.rules.types import Ending, EndReason

F, S, P, X, R = "finished", "surplus", "pruned", "failed", "running"
few_examples = settings(max_examples=60, deadline=None, database=None)


@pytest.mark.parametrize(
    ("sizes", "steps", "last", "ends"),
    [
        pytest.param((2, 4), ["3 stop 10", "0 stop 11"], Settlement((1, 2)), [F, S, S, F], id="enough have finished"),
        pytest.param((3, 5), ["0 stop 1, 1 stop 1"], NOTHING, [F, F, R, R, R], id="not enough yet"),
        pytest.param((1, 2), [""], NOTHING, [R, R], id="no events"),
        pytest.param(
            (2, 5), ["0 stop 9, 1 stop 5, 2 stop 5, 3 stop 5"], Settlement((4,), (0, 3)), [S, F, F, S, S], id="ties"
        ),
        pytest.param((2, 3), ["2 stop 50", "0 stop 5, 1 stop 4"], Settlement((), (0,)), [S, F, F], id="earlier wins"),
        pytest.param((1, 3), ["0 cut 8", "1 cut 8", "2 stop 8"], NOTHING, [F, F, F], id="others are left"),
        pytest.param((1, 3), ["0 cut 8, 1 stop 9"], Settlement((2,), (0,)), [S, F, S], id="cut beside the winner"),
        pytest.param((2, 3), ["0 cut 8", "2 fail 3"], NOTHING, [F, R, X], id="one still runs"),
        pytest.param((2, 3), ["0 cut 8", "2 fail 3", "1 cut 8"], NOTHING, [F, F, X], id="nobody else is left"),
        pytest.param((1, 2), ["0 cut 3", "1 stop 8"], NOTHING, [F, F], id="by itself before cut"),
        pytest.param((2, 4), ["0 fail 0", "1 stop 3, 2 stop 3"], Settlement((3,)), [X, F, F, S], id="one failed"),
        pytest.param((2, 2), ["0 fail 1, 1 stop 1"], NOTHING, [X, F], id="failed ones never count"),
        pytest.param((1, 2), ["0 stop 2", "1 fail 2"], NOTHING, [F, S], id="the engine ends what was stopped"),
        pytest.param((2, 4), ["prune 1 3", "0 stop 5, 2 stop 5"], NOTHING, [F, P, F, P], id="pruned: out of the race"),
        pytest.param((1, 3), ["prune 0, 0 fail 3"], NOTHING, [P, R, R], id="the engine ends what was pruned"),
        pytest.param((2, 5), ["0 cut 9, 1 stop 5", "prune 2 3"], NOTHING, [F, F, P, P, R], id="two may still come"),
        pytest.param((2, 5), ["0 cut 9, 1 stop 5", "prune 2 3", "prune 4"], NOTHING, [F, F, P, P, P], id="they cannot"),
        pytest.param(
            (1, 4), ["0 cut 8, 1 cut 8, 2 fail 8", "prune 3"], Settlement((), (1,)), [F, S, X, P], id="pruning: a tie"
        ),
        pytest.param(
            (1, 3), ["1 cut 8", "0 cut 9", "prune 2"], Settlement((), (0,)), [S, F, P], id="only of that step"
        ),
    ],
)
def test_what_a_race_decides(sizes, steps, last, ends):
    group = launched(*sizes)
    *before, now = play_steps(group, steps)
    assert now == last
    assert all(settlement == NOTHING for settlement in before if settlement.stop != (1,))
    assert states(group) == ends
    assert group.closed == (ends.count(F) >= sizes[0] and R not in ends)
    assert (group.over, group.num_running) == (R not in ends, ends.count(R))


@pytest.mark.parametrize(
    ("sizes", "steps", "last", "ends"),
    [
        pytest.param((2, 3), ["launch, launch, 0 stop 4, 1 cut 8"], NOTHING, [F, F], id="cut waits"),
        pytest.param((2, 3), ["launch, launch, 0 stop 4, 1 cut 8", "launch, 2 stop 6"], NOTHING, [F, F, F], id="came"),
        pytest.param((1, 3), ["launch, 0 stop 2"], NOTHING, [F], id="closed, not over"),
        pytest.param((1, 3), ["launch, 0 stop 2", "launch"], Settlement((1,)), [F, S], id="comes after the end"),
        pytest.param((1, 2), ["launch, 0 stop 2", "launch, 1 stop 1"], Settlement((), (1,)), [F, S], id="ends at once"),
        pytest.param((1, 2), ["launch, 0 stop 2", "launch, 1 fail 0"], NOTHING, [F, X], id="late and failed"),
    ],
)
def test_siblings_that_come_later(sizes, steps, last, ends):
    group = Group(GroupTerms(*sizes))
    assert play_steps(group, steps)[-1] == last
    assert states(group) == ends
    assert group.closed == (sizes != (2, 3) or len(ends) == 3)
    assert group.over == (len(ends) == sizes[1])


@pytest.mark.parametrize(
    ("early_stop", "steps", "complete"),
    [
        (True, ["0 stop 5", "1 fail 6"], False),
        (True, ["0 stop 5", "1 stop 6"], True),
        (False, ["0 stop 5", "1 stop 6"], False),
        (False, ["0 stop 5", "1 stop 6", "2 fail 7"], True),
        (False, ["0 stop 5", "1 fail 6", "2 fail 7"], False),
    ],
)
def test_a_group_is_complete_with_its_trajectories_and_without_early_stop_when_none_runs(early_stop, steps, complete):
    group = launched(2, 3, early_stop)
    play_steps(group, steps)
    assert group.complete is complete
    group.cancelled = True
    assert not group.complete


def test_candidates_are_numbered_by_arrival_unless_they_name_their_index_which_they_have_once():
    group = Group(GroupTerms(2, 3))
    assert [group.launch(), group.launch(), group.launch(5)] == [0, 1, 5]
    with pytest.raises(AssertionError, match="candidate 5 launched twice"):
        group.launch(5)


@pytest.mark.parametrize("reason", ["stop", "length", "failed"])
def test_a_verdict_after_the_end_is_our_mistake(reason):
    group = launched(1, 3, early_stop=False, patience=2)
    end_step(group, (0, reason, 10))
    group.rule_out([1], "pruned")
    for index in (0, 1):
        with pytest.raises(AssertionError, match=f"verdict on candidate {index} after its end"):
            group.rule_out([index], "pruned")
    if group.length_cap is not None:
        with pytest.raises(AssertionError, match="after its end"):
            group.too_long({0: 20})


class Life(NamedTuple):
    """Behaviour of one candidate if nothing stops it."""

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
    """One a step, and one more for each prune verdict."""
    pruned: list[int]
    ended: list[int]
    """Candidates that ended by themselves, truncated, or failed."""
    num_able: list[int]
    """After each step with a prune verdict: candidates that are running, finished or still to come."""


def play(group_size: int, lives: list[Life], *, floor: int = 1, early_stop: bool = True, order: int = 0) -> Play:
    """Run a race as the scheduler does; `order` seeds the order of events within a step.

    A candidate that ends in its detection step is not judged: it has ended.
    """
    shuffled = random.Random(order)
    group = Group(GroupTerms(group_size, len(lives), early_stop))
    game = Play(group, [], [], [], [])

    def settle() -> None:
        settlement = group.settle()
        game.settlements.append(settlement)
        for index in settlement.stop:
            group.end(index, "failed", 0)  # the engine reports what it aborted for us

    for step in range(max(life.end_step for life in lives) + 1):
        arrivals = [i for i, life in enumerate(lives) if life.launch_step == step]
        for index in shuffled.sample(arrivals, len(arrivals)):
            group.launch(index)
        ends = [i for i in group.running if lives[i].end_step == step]
        for index in shuffled.sample(ends, len(ends)):
            group.end(index, lives[index].reason, lives[index].num_tokens)
        game.ended.extend(ends)
        settle()
        due = [i for i in sorted(group.running) if lives[i].detection_step == step]
        if not due or group.closed:
            continue
        num_able = sum(state in (R, F) for state in states(group))
        num_needed = max(0, floor - (num_able - len(due) + group.num_to_come))
        unlucky = [i for i in due if lives[i].unlucky][: len(due) - min(len(due), num_needed)]
        if not unlucky:
            continue
        group.rule_out(unlucky, "pruned")
        for index in unlucky:
            group.end(index, "failed", 0)
        game.pruned.extend(unlucky)
        num_to_come = sum(life.launch_step > step for life in lives)
        game.num_able.append(num_to_come + sum(state in (R, F) for state in states(group)))
        settle()
    return game


lives = st.builds(
    lambda launch, detection, rest, *others: Life(launch, launch + detection, launch + detection + rest, *others),
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
lucky_races = races.map(lambda race: (race[0], [life._replace(unlucky=False) for life in race[1]]))


@few_examples
@given(races, st.booleans(), st.booleans())
def test_every_candidate_reaches_one_end_state_by_one_verdict_at_most(race, allow_fewer, early_stop):
    group_size, pool = race
    group, settlements, pruned, ended, _ = play(*race, floor=1 if allow_fewer else group_size, early_stop=early_stop)
    assert group.over
    stopped = [index for settlement in settlements for index in settlement.stop]
    lost = [index for settlement in settlements for index in settlement.lost_ties]
    assert sorted([*stopped, *pruned, *ended]) == list(range(len(pool)))
    assert set(lost) <= set(ended)
    assert len(lost) == len(set(lost))
    for index, state in enumerate(states(group)):
        assert (state == P) == (index in pruned)
        assert (state == S) == (index in stopped or index in lost)
        assert (state == X) == (index in ended and pool[index].reason == "failed")
    assert early_stop or not (stopped or lost)


@few_examples
@given(races, st.booleans(), st.integers(0, 1000))
def test_pruning_leaves_enough_candidates_able_to_finish_and_closes_when_they_have(race, allow_fewer, order):
    group_size, pool = race
    floor = 1 if allow_fewer else group_size
    group, _, _, _, num_able = play(*race, floor=floor, order=order)
    assert all(num >= floor for num in num_able)
    num_finished = states(group).count(F)
    if all(life.reason != "failed" for life in pool):
        assert num_finished >= floor
    assert group.closed == (num_finished >= group_size)
    if group.closed:
        assert sum(state == F and pool[i].reason == "stop" for i, state in enumerate(states(group))) <= group_size


@few_examples
@given(races, st.integers(1, 1000))
def test_the_order_of_events_within_a_step_does_not_matter(race, order):
    one, other = (play(*race, floor=race[0], order=each) for each in (0, order))
    assert (states(one.group), one.pruned) == (states(other.group), other.pruned)
    by_value = [[(set(s.stop), s.lost_ties) for s in each.settlements] for each in (one, other)]
    assert by_value[0] == by_value[1]


@few_examples
@given(lucky_races)
def test_the_winners_are_the_first_that_end_by_themselves_and_truncated_ones_count_where_others_are_too_few(race):
    group_size, pool = race
    group, settlements, *_ = play(*race)
    valid = [i for i, life in enumerate(pool) if life.reason == "stop"]
    if len(valid) >= group_size:
        ranking = sorted(valid, key=lambda i: (pool[i].end_step, pool[i].num_tokens, i))
        assert [i for i in valid if group.state(i) == F] == sorted(ranking[:group_size])
    closing = next((step for step, settlement in enumerate(settlements) if settlement.stop), None)
    if closing is not None:
        ended = [life.reason for life in pool if life.end_step <= closing]
        num_valid, num_truncated = ended.count("stop"), ended.count("length")
        assert num_valid >= group_size or len(pool) - ended.count("failed") - num_truncated < group_size
        assert num_valid + num_truncated >= group_size


@few_examples
@given(lucky_races, st.booleans())
def test_without_early_stop_or_without_redundancy_everybody_runs_to_the_end(race, early_stop):
    group, settlements, *_ = play(len(race[1]) if early_stop else race[0], race[1], early_stop=early_stop)
    assert set(settlements) == {NOTHING}
    assert states(group) == [X if life.reason == "failed" else F for life in race[1]]


@pytest.mark.parametrize(
    ("group_size", "patience", "steps", "cap"),
    [
        pytest.param(2, 1.5, ["0 stop 10", "1 cut 20", "2 fail 21"], None, id="too few have ended by themselves"),
        pytest.param(2, 1.5, ["0 stop 10", "1 stop 15"], 23, id="of the longest of the first"),
        pytest.param(1, 2, ["0 stop 12, 1 stop 9"], 18, id="of a tie the shorter"),
        pytest.param(1, 2, ["0 stop 10", "1 stop 19"], 20, id="later ones do not move it"),
        pytest.param(1, None, ["0 stop 10"], None, id="no patience"),
    ],
)
def test_a_cap_is_patience_times_the_longest_of_the_first_group_size(group_size, patience, steps, cap):
    group = launched(group_size, 5, False, patience=patience)
    assert set(play_steps(group, steps)) == {NOTHING}
    assert group.length_cap == cap


def test_candidates_given_up_are_surplus_and_the_group_is_over():
    group = launched(1, 3, False, patience=2)
    end_step(group, (0, "stop", 10))
    group.too_long({1: 19, 2: 20})
    assert (states(group), group.over) == ([F, R, S], False)
    group.too_long({1: 20})
    assert group.over


def run(lengths: list[int], group_size: int, patience: float | None) -> list[Ending]:
    """All candidates at once, a token per step, until every one has ended or was given up."""
    group = launched(group_size, len(lengths), False, patience=patience)
    endings, step = {}, 0
    while not group.over:
        step += 1
        for index in [i for i in group.running if lengths[i] == step]:
            group.end(index, "stop", step)
            endings[index] = Ending(index, F, step, end_step=step)
        group.settle()
        if group.length_cap is not None:
            rest = group.too_long(dict.fromkeys(group.running, step))
            endings |= {index: Ending(index, S, step, end_step=step) for index in rest}
    return [endings[index] for index in sorted(endings)]


@few_examples
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.floats(1, 3), st.data())
def test_with_patience_the_shortest_are_those_of_the_whole_pool_and_the_longest_those_up_to_the_cap(
    pool, patience, data
):
    size = data.draw(st.integers(1, len(pool)))
    num_longest = data.draw(st.integers(0, size))
    cap = max(sorted(pool)[size - 1], ceil(patience * sorted(pool)[size - 1]))
    plan = GroupPlan(size, len(pool) - size, False, "dual_end", num_longest)
    plain, patient = (conclude(plan, run(pool, size, each)) for each in (None, patience))
    assert patient.status == "complete"
    assert max(ending.num_tokens for ending in patient.endings) <= cap
    chosen, of_all = (sorted((r.endings[i].num_tokens, i) for i in r.selected) for r in (patient, plain))
    assert chosen[: size - num_longest] == of_all[: size - num_longest]
    if num_longest:
        assert chosen[-1][0] == max(n for n in pool if n <= cap)

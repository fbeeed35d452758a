"""Placement of groups and their siblings on ranks."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.parts.moving.rules.placement import Placement, agreed_rank
from vllm_rollout.parts.moving.rules.work import TokenCost, Work


def test_processes_that_share_nothing_agree_on_a_rank():
    one, other = Placement(4, first_turn=0, alone=False), Placement(4, first_turn=1, alone=False)
    one.place(Work(16))
    ids = [f"group-{i}" for i in range(64)]
    assert [one.join(id, 2) for id in ids] == [other.join(id, 2) for id in ids]
    assert [agreed_rank(id, range(4)) for id in ids] == [one.join(id, 2) for id in ids]
    assert set(Counter(agreed_rank(id, range(4)) for id in ids)) == {0, 1, 2, 3}


def test_a_group_of_joined_siblings_is_forgotten_when_all_have_come_and_gone():
    placement = Placement(2)
    first = placement.join("q1", 2)
    placement.leave_joined("q1")
    assert len(placement) == 1
    placement.place(Work(5), rank=first)
    assert placement.join("q1", 2) == first  # its sibling still follows it
    placement.leave_joined("q1")
    assert len(placement) == 0
    assert placement.join("q1", 2) == 1 - first  # the name may be used again
    assert placement.loads[1 - first] == 1


def test_another_may_come_in_the_place_of_one_that_was_refused():
    placement = Placement(2)
    for refused in (False, True, True):
        placement.join("q1", 2)
        placement.leave_joined("q1", refused=refused)
    assert (placement.join("q1", 2), len(placement)) == (0, 1)
    placement.leave_joined("q1")
    assert len(placement) == 0


def test_groups_that_wait_for_siblings_which_never_come_are_bounded():
    placement = Placement(2, max_idle=3)
    placement.join("running", 2)
    for i in range(10):
        placement.join(f"q{i}", 2)
        placement.leave_joined(f"q{i}")
    assert len(placement) == 4
    placement.leave_joined("running")
    assert sum(placement.loads) == 0


def test_siblings_follow_the_first_of_them_wherever_they_are_pinned():
    placement = Placement(2)
    assert [placement.join("q1", 3, rank=1), placement.join("q1", 3), placement.join("q1", 3, rank=0)] == [1, 1, 1]
    for _ in range(3):
        placement.leave_joined("q1")
    assert (placement.loads, len(placement)) == ([0, 0], 0)


def test_a_held_rank_gets_nothing_and_the_others_keep_their_turns():
    placement = Placement(3)
    placement.held = frozenset({1})
    assert [placement.place(Work(1)) for _ in range(4)] == [0, 2, 0, 2]
    assert placement.place(Work(1), rank=1) == 1
    placement.held = frozenset()
    assert placement.place(Work(1)) == 1


def test_only_the_groups_of_a_held_rank_are_agreed_upon_anew():
    ids = [f"group-{i}" for i in range(200)]
    before = [agreed_rank(id, range(4)) for id in ids]
    after = [agreed_rank(id, (0, 1, 3)) for id in ids]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != 2)
    assert {new for old, new in zip(before, after, strict=True) if old == 2} == {0, 1, 3}


def test_siblings_that_move_take_their_load_along_and_those_to_come_follow():
    placement = Placement(3)
    assert [placement.join("q1", 4), placement.join("q1", 4)] == [0, 0]
    placement.move_joined("q1", 1)
    assert placement.loads == [0, 2, 0]
    assert placement.join("q1", 4) == 1
    for _ in range(3):
        placement.leave_joined("q1")
    placement.move_joined("q1", 0)  # nothing of it runs now
    assert placement.loads == [0, 0, 0]
    assert placement.join("q1", 4) == 0
    assert placement.leave_joined("q1") == "q1"
    placement.move_joined("q1", 2)  # it is over
    assert len(placement) == 0


def test_predicted_work_counts_and_not_the_number_of_candidates():
    placement = Placement(2)
    assert [placement.place(Work(2, 900)), placement.place(Work(8, 100)), placement.place(Work(8, 100))] == [0, 1, 1]
    assert placement.loads == [900, 200]
    placement.change(0, Work(2, 900), Work(1, 150))
    assert placement.place(Work(1, 10)) == 0
    placement.leave(0, Work(1, 150))
    placement.leave(0, Work(1, 10))
    assert placement.loads == [0, 200]


def test_what_nothing_predicts_counts_as_the_average_of_what_is_predicted():
    placement = Placement(3)
    placement.place(Work(4), rank=0)
    placement.others = [0, 2, 0]
    assert placement.loads == [4, 2, 0]
    placement.place(Work(4, 400), rank=2)
    assert placement.loads == [400, 200, 400]
    placement.join("q", 2, rank=1)
    assert placement.loads == [400, 300, 400]


def test_long_contexts_weigh_what_they_cost():
    placement = Placement(2)
    placement.place(Work(1, 1000, 500_000))
    placement.place(Work(10, 1000, 50_000))
    assert placement.loads == [1000, 1000]
    placement.token_cost = TokenCost(token=1.0, context=0.01)
    assert placement.loads == [6000, 1500]


works = st.integers(1, 32).flatmap(lambda num: st.builds(Work, st.just(num), st.integers(num, 10_000)))


@pytest.mark.thorough
@given(st.lists(works, min_size=1, max_size=40), st.integers(1, 8), st.integers(0, 7), st.data())
def test_no_rank_has_more_than_the_optimum_and_the_largest_group(placed, num_ranks, turn, data):
    """Graham's bound of list scheduling, also among the ranks that are not held."""
    placement = Placement(num_ranks, turn)
    placement.held = data.draw(st.frozensets(st.integers(0, num_ranks - 1), max_size=num_ranks - 1))
    ranks = [placement.place(work) for work in placed]
    assert placement.held.isdisjoint(ranks)
    total, largest = sum(work.tokens for work in placed), max(work.tokens for work in placed)
    num_open = num_ranks - len(placement.held)
    assert max(placement.loads) <= total / num_open + largest * (1 - 1 / num_open) + 1e-6
    for work, rank in zip(placed, ranks, strict=True):
        placement.leave(rank, work)
    assert (placement.loads, placement.num_candidates) == ([0] * num_ranks, [0] * num_ranks)


@given(st.lists(st.tuples(st.integers(1, 32), st.integers(0, 3)), max_size=40), st.integers(1, 6), st.integers(0, 5))
def test_without_a_history_loads_are_numbers_of_candidates(groups, num_ranks, turn):
    placement, counts = Placement(num_ranks, turn), [0] * num_ranks
    turn %= num_ranks
    running: list[tuple[int, int]] = []
    for num, num_over in groups:
        for _ in range(min(num_over, len(running))):
            rank, over = running.pop(0)
            placement.leave(rank, Work(over))
            counts[rank] -= over
        rank = min(range(num_ranks), key=lambda r: (counts[r], (r - turn) % num_ranks))
        assert placement.place(Work(num)) == rank
        counts[rank] += num
        turn = (rank + 1) % num_ranks
        running.append((rank, num))
        assert placement.loads == counts


@given(st.data(), st.integers(1, 4), st.booleans())
def test_loads_are_what_is_on_its_way_and_siblings_stay_together(data, num_ranks, alone):
    placement = Placement(num_ranks, alone=alone, max_idle=100)
    running: list[tuple[str, int]] = []
    ranks: dict[str, int] = {}
    num_left: Counter[str] = Counter()
    for _ in range(data.draw(st.integers(0, 30))):
        if running and data.draw(st.booleans()):
            group_id, _ = running.pop(data.draw(st.integers(0, len(running) - 1)))
            placement.leave_joined(group_id)
            num_left[group_id] += 1
            if num_left[group_id] == 3:
                del ranks[group_id], num_left[group_id]
        else:
            group_id = data.draw(st.sampled_from("abc"))
            if num_left[group_id] + [id for id, _ in running].count(group_id) == 3:
                continue
            rank = placement.join(group_id, 3)
            assert ranks.setdefault(group_id, rank) == rank
            running.append((group_id, rank))
        assert placement.loads == [[rank for _, rank in running].count(rank) for rank in range(num_ranks)]
        assert len(placement) == len(ranks)

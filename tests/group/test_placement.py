"""Where groups and their siblings run."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.group.placement import Placement, agreed_rank, choose_rank


def loads(placement: Placement) -> list[int]:
    return [placement.loads[rank] for rank in range(placement.num_ranks)]


@pytest.mark.parametrize(
    ("loads", "turn", "rank"),
    [
        ([0], 0, 0),
        ([3, 1, 2], 0, 1),
        ([0, 0, 0], 1, 1),
        ([5, 0, 0], 0, 1),
        ([0, 5, 0], 1, 2),
        ([0, 5, 5], 2, 0),
    ],
)
def test_the_least_load_wins_and_ties_go_in_turn(loads, turn, rank):
    assert choose_rank(loads, turn) == rank


def test_groups_that_come_together_spread_by_their_candidates():
    placement = Placement(3)
    assert [placement.place(8), placement.place(2), placement.place(2), placement.place(2)] == [0, 1, 2, 1]
    assert loads(placement) == [8, 4, 2]
    placement.leave(0, 8)
    assert placement.place(1) == 0


def test_groups_one_after_the_other_take_turns():
    placement = Placement(3, first_turn=4)
    ranks = []
    for _ in range(5):
        ranks.append(placement.place(4))
        placement.leave(ranks[-1], 4)
    assert ranks == [1, 2, 0, 1, 2]


def test_a_rank_that_the_user_pins_counts_and_takes_no_turn():
    placement = Placement(2)
    assert placement.place(4, rank=1) == 1
    assert loads(placement) == [0, 4]
    assert placement.place(4) == 0


@pytest.mark.parametrize("alone", [True, False])
def test_siblings_meet_and_are_counted(alone):
    placement = Placement(4, alone=alone)
    ranks = {placement.join("q1", 3) for _ in range(3)}
    assert len(ranks) == 1
    assert placement.loads[ranks.pop()] == sum(loads(placement)) == 3


def test_joined_groups_spread_over_ranks_and_keep_off_a_loaded_one():
    placement = Placement(2)
    assert placement.place(8) == 0
    assert [placement.join(f"q{i}", 4) for i in range(4)] == [1] * 4
    assert [placement.join(f"q{i}", 4) for i in range(4)] == [1] * 4
    assert [placement.join("q4", 4), placement.join("q5", 4)] == [0, 1]


def test_processes_that_share_nothing_agree_on_a_rank():
    one, other = Placement(4, first_turn=0, alone=False), Placement(4, first_turn=1, alone=False)
    one.place(16)
    ids = [f"group-{i}" for i in range(64)]
    assert [one.join(id, 2) for id in ids] == [other.join(id, 2) for id in ids]
    assert [agreed_rank(id, range(4)) for id in ids] == [one.join(id, 2) for id in ids]
    assert set(Counter(agreed_rank(id, range(4)) for id in ids)) == {0, 1, 2, 3}


def test_a_group_of_joined_siblings_is_forgotten_when_all_have_come_and_gone():
    placement = Placement(2)
    first = placement.join("q1", 2)
    placement.leave_joined("q1")
    assert len(placement) == 1
    placement.place(5, rank=first)
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
    assert sum(loads(placement)) == 0


def test_siblings_follow_the_first_of_them_wherever_they_are_pinned():
    placement = Placement(2)
    assert [placement.join("q1", 3, rank=1), placement.join("q1", 3), placement.join("q1", 3, rank=0)] == [1, 1, 1]
    for _ in range(3):
        placement.leave_joined("q1")
    assert (loads(placement), len(placement)) == ([0, 0], 0)


def test_a_held_rank_gets_nothing_and_the_others_keep_their_turns():
    placement = Placement(3)
    placement.held = frozenset({1})
    assert [placement.place(1) for _ in range(4)] == [0, 2, 0, 2]
    assert placement.place(1, rank=1) == 1
    placement.held = frozenset()
    assert placement.place(1) == 1


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
    assert loads(placement) == [0, 2, 0]
    assert placement.join("q1", 4) == 1
    for _ in range(3):
        placement.leave_joined("q1")
    placement.move_joined("q1", 0)  # nothing of it runs now
    assert loads(placement) == [0, 0, 0]
    assert placement.join("q1", 4) == 0
    assert placement.leave_joined("q1") == "q1"
    placement.move_joined("q1", 2)  # it is over
    assert len(placement) == 0


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
        assert loads(placement) == [[rank for _, rank in running].count(rank) for rank in range(num_ranks)]
        assert len(placement) == len(ranks)

"""Groups and their siblings on ranks."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.kernel.rules.ranks import Ranks, agreed_rank


def candidates(num: int) -> dict[int, int]:
    return dict.fromkeys(range(num), 0)


@pytest.mark.parametrize(
    ("loads", "turn", "rank"),
    [([3, 3, 3], 0, 0), ([3, 3, 3], 1, 1), ([3, 3, 3], 2, 2), ([1, 2, 1, 2], 1, 2), ([1, 2, 1, 2], 3, 0)],
)
def test_of_ranks_with_the_least_load_the_next_in_turn_gets_a_group(loads, turn, rank):
    ranks = Ranks(len(loads), turn)
    ranks.others = loads
    assert ranks.next_rank() == rank


def test_requests_of_others_count_in_the_load_of_a_rank():
    ranks = Ranks(2)
    ranks.others = [2, 0]
    assert [ranks.open(candidates(1)).rank for _ in range(2)] == [1, 1]
    assert ranks.loads == [2, 2]


def test_processes_that_share_nothing_agree_on_a_rank():
    one, other = Ranks(4, first_turn=0, alone=False), Ranks(4, first_turn=1, alone=False)
    one.open(candidates(16))
    ids = [f"group-{i}" for i in range(64)]
    assert [one.join(id, 2) for id in ids] == [other.join(id, 2) for id in ids]
    assert [agreed_rank(id, range(4)) for id in ids] == [one.join(id, 2) for id in ids]
    assert set(Counter(agreed_rank(id, range(4)) for id in ids)) == {0, 1, 2, 3}


def test_a_group_of_joined_siblings_is_forgotten_when_all_have_come_and_gone():
    ranks = Ranks(2)
    first = ranks.join("q1", 2)
    ranks.leave_joined("q1")
    assert len(ranks) == 1
    ranks.open(candidates(5), first)
    assert ranks.join("q1", 2) == first  # its sibling still follows it
    ranks.leave_joined("q1")
    assert len(ranks) == 0
    assert ranks.join("q1", 2) == 1 - first  # the name may be used again
    assert ranks.loads[1 - first] == 1


def test_another_may_come_in_the_place_of_one_that_was_refused():
    ranks = Ranks(2)
    for refused in (False, True, True):
        ranks.join("q1", 2)
        ranks.leave_joined("q1", refused=refused)
    assert (ranks.join("q1", 2), len(ranks)) == (0, 1)
    ranks.leave_joined("q1")
    assert len(ranks) == 0


def test_groups_that_wait_for_siblings_which_never_come_are_bounded():
    ranks = Ranks(2, max_idle=3)
    ranks.join("running", 2)
    for i in range(10):
        ranks.join(f"q{i}", 2)
        ranks.leave_joined(f"q{i}")
    assert len(ranks) == 4
    ranks.leave_joined("running")
    assert sum(ranks.loads) == 0


def test_siblings_follow_the_first_of_them_wherever_they_are_pinned():
    ranks = Ranks(2)
    assert [ranks.join("q1", 3, rank=1), ranks.join("q1", 3), ranks.join("q1", 3, rank=0)] == [1, 1, 1]
    for _ in range(3):
        ranks.leave_joined("q1")
    assert (ranks.loads, len(ranks)) == ([0, 0], 0)


def test_a_held_rank_gets_nothing_and_the_others_keep_their_turns():
    ranks = Ranks(3)
    ranks.held = frozenset({1})
    assert [ranks.open(candidates(1)).rank for _ in range(4)] == [0, 2, 0, 2]
    assert ranks.open(candidates(1), 1).rank == 1
    ranks.held = frozenset()
    assert ranks.open(candidates(1)).rank == 1


def test_only_the_groups_of_a_held_rank_are_agreed_upon_anew():
    ids = [f"group-{i}" for i in range(200)]
    before = [agreed_rank(id, range(4)) for id in ids]
    after = [agreed_rank(id, (0, 1, 3)) for id in ids]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != 2)
    assert {new for old, new in zip(before, after, strict=True) if old == 2} == {0, 1, 3}


def test_siblings_that_move_take_their_load_along_and_those_to_come_follow():
    ranks = Ranks(3)
    assert [ranks.join("q1", 4), ranks.join("q1", 4)] == [0, 0]
    ranks.move_joined("q1", 1)
    assert ranks.loads == [0, 2, 0]
    assert ranks.join("q1", 4) == 1
    for _ in range(3):
        ranks.leave_joined("q1")
    ranks.move_joined("q1", 0)  # nothing of it runs now
    assert ranks.loads == [0, 0, 0]
    assert ranks.join("q1", 4) == 0
    assert ranks.leave_joined("q1") == "q1"
    ranks.move_joined("q1", 2)  # it is over
    assert len(ranks) == 0


@given(st.data(), st.integers(1, 4), st.booleans())
def test_loads_are_what_is_on_its_way_and_siblings_stay_together(data, num_ranks, alone):
    ranks = Ranks(num_ranks, alone=alone, max_idle=100)
    running: list[tuple[str, int]] = []
    rank_of: dict[str, int] = {}
    num_left: Counter[str] = Counter()
    for _ in range(data.draw(st.integers(0, 30))):
        if running and data.draw(st.booleans()):
            group_id, _ = running.pop(data.draw(st.integers(0, len(running) - 1)))
            ranks.leave_joined(group_id)
            num_left[group_id] += 1
            if num_left[group_id] == 3:
                del rank_of[group_id], num_left[group_id]
        else:
            group_id = data.draw(st.sampled_from("abc"))
            if num_left[group_id] + [id for id, _ in running].count(group_id) == 3:
                continue
            rank = ranks.join(group_id, 3)
            assert rank_of.setdefault(group_id, rank) == rank
            running.append((group_id, rank))
        assert ranks.loads == [[rank for _, rank in running].count(rank) for rank in range(num_ranks)]
        assert len(ranks) == len(rank_of)

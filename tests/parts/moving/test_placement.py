"""Placement of predicted work on ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.parts.moving.rules.placement import Placement
from vllm_rollout.parts.moving.rules.work import TokenCost, Work


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


def test_joined_siblings_leave_with_their_load():
    placement = Placement(2)
    placement.place(Work(4, 400), placement.join("q", 2))
    assert placement.loads == [500, 0]
    placement.move_joined("q", 1)
    assert placement.loads == [400, 100]
    placement.leave_joined("q")
    assert (placement.loads, placement.num_candidates) == ([400, 0], [4, 0])


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

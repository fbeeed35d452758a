"""Advice to free half of the ranks: RollPacker's criterion by hand, and invariants of all advice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parts.moving.rank_loads import moved, rank, ranks_with_groups, straggler
from vllm_rollout.parts.moving.rules.load import RankLoad
from vllm_rollout.parts.moving.rules.scaling import Progress, plan_scale_down

AT_30 = Progress(100, 30)


def four_ranks(capacity: int) -> list[RankLoad]:
    """Each with two groups: a prompt of 10, 40 tokens generated, 50 to come. Their peak is 800 tokens in all."""
    return [
        rank(number, *(straggler(f"{number}{name}", 50, 1, 10, 40) for name in "ab"), kv_capacity_tokens=capacity)
        for number in range(4)
    ]


def test_half_of_the_ranks_are_freed_when_the_peak_fits_the_other_half():
    advice = plan_scale_down(AT_30, four_ranks(400))
    assert (advice.reason, advice.ranks) == ("free", (0, 1))
    assert {move.source for move in advice.moves} == {0, 1}
    assert sorted(move.target for move in advice.moves) == [2, 2, 3, 3]
    assert advice.explanation == (
        "30 of 100 responses (30%) are complete; the rest has a predicted peak of 800 tokens of KV cache, ranks [2, 3] "
        "have 800"
    )


def test_no_rank_is_freed_when_the_peak_does_not_fit_by_one_token():
    advice = plan_scale_down(AT_30, four_ranks(399))
    assert (advice.reason, advice.ranks, advice.moves) == ("no_room", (), ())
    assert advice.explanation.endswith("peak of 800 tokens of KV cache, ranks [2, 3] have 798")
    one_too_full = [rank(0), rank(1, straggler("a", 500), kv_capacity_tokens=400)]
    assert plan_scale_down(AT_30, one_too_full).reason == "no_room"


@pytest.mark.parametrize(
    ("progress", "reason"),
    [
        (Progress(100, 19), "too_early"),
        (Progress(100, 20), "free"),
        (Progress(100, 50), "free"),
        (Progress(100, 51), "too_late"),
        (Progress(100, 24, 20), "between_checks"),
        (Progress(140, 35, 28), "free"),  # 0.05 * 140 is more than 7 in floating point
        (Progress(0, 0), "too_early"),
        (Progress(100, 30, is_scaled_down=True), "scaled_down"),
    ],
)
def test_it_is_checked_between_20_and_50_percent_every_5_until_it_is_done(progress, reason):
    advice = plan_scale_down(progress, four_ranks(400))
    assert (advice.reason, advice.was_checked) == (reason, reason == "free")


def test_of_an_odd_number_the_smaller_half_is_freed_and_of_one_none():
    three = four_ranks(1000)[:3]
    assert plan_scale_down(AT_30, three).ranks == (0,)
    assert plan_scale_down(AT_30, three[:1]).reason == "too_few_ranks"


def test_ranks_with_other_requests_stay():
    two = [rank(0, straggler("a", 1), other_requests=1), rank(1, straggler("b", 9))]
    assert plan_scale_down(AT_30, two).ranks == (1,)
    busy = [rank(0, other_requests=1), rank(1, other_requests=1)]
    advice = plan_scale_down(AT_30, busy)
    assert (advice.reason, advice.explanation) == (
        "too_few_ranks",
        "0 of 2 ranks can be emptied; 1 would have to be",
    )


@pytest.mark.thorough
@given(ranks_with_groups(max_ranks=8), st.integers(1, 200), st.data())
def test_an_advice_frees_half_and_fits(loads, num_responses, data):
    num_complete = data.draw(st.integers(0, num_responses))
    advice = plan_scale_down(Progress(num_responses, num_complete), loads)
    assert bool(advice.ranks) == (advice.reason == "free")
    if not advice.ranks:
        assert not advice.moves
        return
    assert 0.2 <= num_complete / num_responses <= 0.5
    usable = {load.rank for load in loads if not load.is_held}
    assert set(advice.ranks) <= usable
    assert len(set(advice.ranks)) == len(advice.ranks) == len(usable) // 2
    ranks, _ = moved(loads, advice.moves)
    for number in usable - set(advice.ranks):
        assert ranks[number].room.kv_tokens >= 0
    for number in advice.ranks:
        assert not ranks[number].groups
        assert not ranks[number].other_requests
    assert all(move.target in usable - set(advice.ranks) for move in advice.moves)

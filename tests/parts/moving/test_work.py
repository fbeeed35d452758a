"""Remaining work of candidates, and its weight."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.parts.moving.rules.work import RankWork, TokenCost, Work
from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve
from vllm_rollout.parts.shaping.rules.moments import LengthMoments, expected_remaining

LENGTHS = LengthMoments(200.0, 10_000.0, 4)


def test_work_is_what_is_expected_to_come():
    assert Work.of([0, 0], None, 100, 10) == Work(2)
    fresh = expected_remaining(0, LENGTHS)
    assert Work.of([0, 0], LENGTHS, None, 10) == Work(2, round(2 * fresh), round(2 * fresh * (10 + fresh / 2)))
    old = expected_remaining(300, LENGTHS)
    assert Work.of([0, 300], LENGTHS, None, 10).tokens == round(fresh + old)
    assert Work.of([], LENGTHS, None, 10) == Work(0, 0, 0)


def test_work_never_goes_beyond_max_tokens():
    assert Work.of([0, 40], LENGTHS, 50, 10) == Work(2, 50 + 10, 50 * 35 + 10 * 55)


def cost(*curves, max_num_seqs=None):
    return CostModel(
        tuple((float(context), PTLCurve((1.0, 101.0), seconds)) for context, seconds in curves),
        max_num_seqs=max_num_seqs,
    )


@pytest.mark.parametrize(
    ("profile", "weights"),
    [
        (cost((0, (1.0, 2.0))), TokenCost(0.01)),
        (cost((0, (1.0, 1.0))), TokenCost()),
        (cost((0, (1.0, 2.0)), (1000, (1.0, 4.0))), TokenCost(0.01, 0.02 / 1000)),
        (cost((0, (1.0, 1.0)), (1000, (1.0, 4.0))), TokenCost(0.0, 0.03 / 1000)),
        (cost((0, (1.0, 2.0)), (1000, (1.0, 1.5)), max_num_seqs=64), TokenCost(0.01)),
    ],
    ids=["computation", "nothing", "both", "context", "noise"],
)
def test_a_profile_weighs_tokens_and_their_contexts(profile, weights):
    assert TokenCost.of(profile) == pytest.approx(weights)


def test_weighed_work_is_what_the_profile_says_of_its_steps():
    """One candidate more runs in steps of others as old, where time is linear in batch and context."""
    profile = cost((0, (1.0, 2.0)), (1000, (1.0, 4.0)))
    contexts = range(50, 150)
    work = RankWork()
    work.add(Work(1, len(contexts), sum(contexts)))
    longer = sum(profile.ptl(41, context) - profile.ptl(40, context) for context in contexts)
    assert work.cost(TokenCost.of(profile)) == pytest.approx(longer)


@given(st.lists(st.tuples(st.integers(0, 99), st.none() | st.integers(0, 10**9), st.integers(0, 10**12)), max_size=20))
def test_what_is_added_and_taken_away_leaves_nothing(parts):
    rank = RankWork()
    for part in parts:
        rank.add(Work(*part))
    for part in reversed(parts):
        rank.add(Work(*part), -1)
    assert rank == RankWork()

"""Expected remaining length of candidates."""

from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.parts.moving.rules.load import GroupLoad
from vllm_rollout.parts.shaping.rules.moments import LATE_SHARE, LengthMoments, expected_remaining, late_remaining


def test_without_a_history_a_candidate_lives_as_long_again():
    assert [expected_remaining(num) for num in (0, 1, 700)] == [1, 1, 700]
    assert [round(late_remaining(num)) for num in (0, 1, 700)] == [
        1,
        3,
        2430,
    ]  # 1 / 4.47 ** 2 is a twentieth


def test_nothing_goes_on_beyond_max_tokens():
    assert expected_remaining(700, max_tokens=1000) == 300
    assert expected_remaining(1000, max_tokens=1000) == 1
    assert late_remaining(700, max_tokens=1000) == 300


@pytest.mark.parametrize("age", [0, 400, 2000])
def test_with_a_history_it_is_the_mean_residual_life(age):
    chance = Random(5)
    lengths = [chance.lognormvariate(6.0, 0.7) for _ in range(400_000)]
    mean = fmean(lengths)
    moments = LengthMoments(mean, fmean((length - mean) ** 2 for length in lengths), 100)
    beyond = [length - age for length in lengths if length > age]
    assert expected_remaining(age, moments) == pytest.approx(fmean(beyond), rel=0.05)
    late = sorted(beyond)[-round(LATE_SHARE * len(beyond))]
    assert late_remaining(age, moments) == pytest.approx(late, rel=0.05)


@given(
    st.integers(0, 100_000),
    st.none() | st.builds(LengthMoments, st.floats(0, 1e6), st.floats(0, 1e12), st.just(1)),
    st.integers(1, 100_000),
)
def test_it_is_a_token_at_least_and_ends_at_the_cap(num_tokens, lengths, more):
    assert 1 <= expected_remaining(num_tokens, lengths, num_tokens + more) <= more
    assert 1 <= late_remaining(num_tokens, lengths, num_tokens + more) <= more


def test_the_load_of_a_group_adds_up_its_candidates():
    load = GroupLoad.of("a", 100, [10, 40, 300], max_tokens=400)
    assert load == GroupLoad("a", 3, 100, 350, 100, 150, late_remaining=pytest.approx(40 * (20**0.5 - 1)))
    assert load.kv_tokens == 450
    assert load.peak_kv_tokens == 600
    assert load.lengths == [100, 25, 25]
    assert load.late.lengths == [139] * 3

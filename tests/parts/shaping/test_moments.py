"""Moments of lengths that are cut at max_tokens."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.parts.shaping.rules.moments import LengthMoments

moments = st.builds(LengthMoments, st.floats(0, 1e15), st.floats(0, 1e36), st.integers(1, 9))


@given(moments, st.integers(1, 2**31))
def test_cut_lengths_are_shorter_and_spread_by_half_of_the_cap_at_most(seen, max_tokens):
    cut = seen.cut(max_tokens)
    assert 0 <= cut.mean <= min(seen.mean, max_tokens)
    assert 0 <= cut.variance <= seen.variance
    assert cut.std <= max_tokens / 2 * (1 + 1e-9) or not seen.mean
    assert cut.num_groups == seen.num_groups


def test_without_a_cap_nothing_changes():
    seen = LengthMoments(100.0, 900.0, 2, ((70.0, 0.5), (130.0, 0.5)))
    assert seen.cut(None) is seen
    assert seen.cut(10**6).std == pytest.approx(30)


def test_where_the_distribution_is_known_it_is_cut():
    lengths = [10.0, 20.0, 400.0, 900.0]
    seen = LengthMoments(
        statistics.fmean(lengths), statistics.pvariance(lengths), 1, tuple((length, 0.25) for length in lengths)
    )
    cut = seen.cut(400)
    assert cut.mean == pytest.approx(statistics.fmean([10, 20, 400, 400]))
    assert cut.variance == pytest.approx(statistics.pvariance([10, 20, 400, 400]))

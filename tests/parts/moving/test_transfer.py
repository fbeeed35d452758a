"""Cost of moving KV cache, before and after the first transfer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.parts.moving.rules.load import ASSUMED_BYTES_PER_S, NEWEST_WEIGHT, TransferCost


def test_before_the_first_transfer_a_rate_is_assumed():
    cost = TransferCost.assumed(2048.0, 16)
    assert cost == TransferCost(2048 / ASSUMED_BYTES_PER_S, 16)
    assert cost.num_computed(3) == 24


def test_each_transfer_counts_for_what_it_took_per_token():
    cost = TransferCost(0.004, 16).after(100, 0.2)
    assert cost == TransferCost(pytest.approx(0.004 + NEWEST_WEIGHT * (0.002 - 0.004)), 16)


@given(st.floats(1e-9, 1), st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 100)), min_size=1, max_size=50))
def test_a_price_stays_between_what_it_was_and_what_was_seen(s_per_token, transfers):
    cost = TransferCost(s_per_token, 16)
    seen = [s_per_token]
    for num_tokens, seconds in transfers:
        cost = cost.after(num_tokens, seconds)
        seen.append(seconds / num_tokens)
        assert 0 < min(seen) * (1 - 1e-9) <= cost.s_per_token <= max(seen) * (1 + 1e-9)

"""Requests that were not placed here, from counts that come late."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.kernel.rules.other_requests import OtherRequests


def test_a_count_that_has_not_heard_of_what_was_sent_or_has_ended_takes_nothing_away():
    others = OtherRequests(1)
    assert others.look([5], [0], now_s=0.0) == [5]
    assert others.look([5], [16], now_s=0.05) == [5]
    assert others.look([21], [32], now_s=0.2) == [5]
    assert others.look([37], [32], now_s=1.0) == [5]
    assert others.look([37], [0], now_s=1.01) == [5]
    assert others.look([5], [0], now_s=2.0) == [5]


def test_what_must_have_changed_has():
    others = OtherRequests(1)
    assert others.look([5], [0], now_s=0.0) == [5]
    assert others.look([30], [10], now_s=0.1) == [20]
    assert others.look([3], [10], now_s=0.2) == [3]


steps = st.lists(
    st.tuples(st.floats(0.0, 0.5), st.integers(0, 40), st.integers(0, 30), st.floats(0.0, 0.29)),
    min_size=2,
    max_size=30,
)


def played(steps, num_others):
    """Own candidates change after each look; every count is of a time up to as late as it may be.

    Yields (estimate, others in the count, least and most own candidates in thrice the time that it may be late).
    """
    others, now_s = OtherRequests(1), 0.0
    own = [(-1.0, 0)]
    foreign = [(-1.0, num_others(steps[0][2]))]
    for wait_s, num_own, num_foreign, late_s in steps:
        now_s += wait_s
        counted_own = [num for at_s, num in own if at_s <= now_s - late_s][-1]
        counted_foreign = [num for at_s, num in foreign if at_s <= now_s - late_s][-1]
        (estimate,) = others.look([counted_own + counted_foreign], [own[-1][1]], now_s)
        before = [num for at_s, num in own if at_s <= now_s - 0.9][-1:]
        lately = before + [num for at_s, num in own if at_s > now_s - 0.9]
        yield estimate, counted_foreign, min(lately), max(lately)
        own.append((now_s, num_own))
        foreign.append((now_s, num_others(num_foreign)))


@given(steps, st.integers(0, 30))
def test_an_estimate_that_is_right_stays_right_whatever_is_placed(steps, num):
    assert [estimate for estimate, *_ in played(steps, lambda drawn: num)] == [num] * len(steps)


@given(steps)
def test_no_estimate_is_further_off_than_own_candidates_have_changed(steps):
    for estimate, counted, least, most in played(steps, lambda drawn: drawn):
        assert abs(estimate - counted) <= most - least

"""The bias meter: trained groups, compared with all that were admitted."""

from __future__ import annotations

from statistics import stdev

import pytest

from vllm_rollout.parts.feeds.rules.bias import BiasMeter, GroupSize, Moments, Share, share_of


def metered(trained: list[float], dropped: list[float]) -> BiasMeter:
    meter = BiasMeter()
    for tokens in trained:
        meter.over("trained", GroupSize(tokens, 1.0))
    for tokens in dropped:
        meter.over("dropped", GroupSize(tokens))
    return meter


def test_moments_are_those_of_the_values():
    values = [3.0, 5.0, 10.0]
    moments = Moments()
    for value in values:
        moments.add(value)
    assert moments.mean == 6.0
    assert moments.std_error == pytest.approx(stdev(values) / 3**0.5)
    assert (Moments().mean, Moments().std_error) == (None, None)


def test_trained_groups_that_are_shorter_by_more_than_the_standard_error_are_named():
    meter = metered([10.0, 11.0, 12.0] * 4, [100.0] * 4)
    warning = meter.warning(meter.admitted())
    assert warning is not None
    assert "trained groups have 11.0 tokens on average, admitted ones at least 33.2" in warning


def test_running_groups_count_as_admitted():
    meter = metered([10.0, 11.0, 12.0] * 4, [])
    assert meter.warning(meter.admitted()) is None
    assert meter.warning(meter.admitted(share_of([GroupSize(90.0)] * 6))) is not None


def test_few_groups_and_a_difference_within_the_error_are_no_reason_to_warn():
    few = metered([10.0] * 7, [100.0] * 4)
    assert few.warning(few.admitted()) is None
    spread = metered([1.0, 99.0] * 4, [60.0])
    assert spread.warning(spread.admitted()) is None


def test_rewards_are_of_groups_that_have_one():
    meter = metered([10.0], [20.0])
    admitted: Share = meter.admitted()
    assert (admitted.tokens.num, admitted.rewards.num, admitted.rewards.mean) == (2, 1, 1.0)


def test_a_warning_names_those_who_take_the_long_groups():
    remedies = {"dropped": "raise max_staleness", "filtered": "The filter removes longer", "failed": "has the reasons"}
    for fate, remedy in remedies.items():
        meter = metered([10.0, 11.0, 12.0] * 4, [12.0])
        for _ in range(4):
            meter.over(fate, GroupSize(100.0))
        assert remedy in (meter.warning(meter.admitted()) or "")
    meter = metered([10.0, 11.0, 12.0] * 4, [])
    assert "come later" in (meter.warning(meter.admitted(share_of([GroupSize(90.0)] * 6))) or "")

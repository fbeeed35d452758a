import math
import random
import statistics
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.parts.shaping.rules.censoring import (
    LOG_STD_PRIOR_WEIGHT,
    MAX_LOG_STD,
    MAX_STOPS,
    MIN_LOG_STD,
    LogLengthFit,
    counted_stops,
    fit_log_lengths,
    group_moments,
    length_beyond,
    log_survival,
    moments_beyond,
)

MEDIAN = 400
lengths = st.lists(st.integers(0, 2**31), max_size=20)
usual_lengths = st.lists(st.integers(20, 4000), min_size=2, max_size=12)


def log_normal_lengths(rng: random.Random, log_std: float, num: int) -> list[int]:
    return sorted(max(1, round(MEDIAN * math.exp(log_std * rng.gauss(0, 1)))) for _ in range(num))


def early_stopped(rng: random.Random, log_std: float, num: int, group_size: int = 8) -> tuple[list[int], list[int]]:
    """The others run until the last of the first `group_size` has finished."""
    drawn = log_normal_lengths(rng, log_std, num)
    return drawn[:group_size], [drawn[group_size - 1]] * (num - group_size)


def true_mean(log_std: float) -> float:
    return MEDIAN * math.exp(log_std**2 / 2)


def true_std(log_std: float) -> float:
    return true_mean(log_std) * math.sqrt(math.exp(log_std**2) - 1)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**31), min_size=2, max_size=20))
def test_groups_without_censored_lengths_give_exactly_their_sample_moments(finished):
    moments = group_moments(finished, [], 0.7)
    assert moments.mean == statistics.fmean(finished)
    assert moments.variance == float(statistics.variance(finished))
    assert moments.spread == pytest.approx(statistics.pvariance(finished))


@pytest.mark.parametrize("log_std", [0.5, 0.8, 1.2])
@pytest.mark.parametrize("num", [9, 12, 16])
def test_early_stop_does_not_shrink_the_moments(log_std, num):
    """Stops taken for lengths would put the mean 6 to 64 % and the standard deviation 29 to 92 % too low; the sample
    standard deviation of 8 finished candidates is 8 to 32 % too low by itself."""
    rng = random.Random(num)
    groups = [group_moments(*early_stopped(rng, log_std, num), log_std) for _ in range(300)]
    assert statistics.fmean(g.mean for g in groups) == pytest.approx(true_mean(log_std), rel=0.1)
    assert statistics.fmean(math.sqrt(g.variance) for g in groups) == pytest.approx(true_std(log_std), rel=0.2)
    assert math.sqrt(statistics.fmean(g.variance for g in groups)) > 0.85 * true_std(log_std)


@settings(max_examples=50, deadline=None)
@given(lengths, lengths, st.floats(0, 10))
def test_any_lengths_give_finite_moments(finished, stops, prior_std):
    if not finished and not stops:
        finished = [0]
    moments = group_moments(finished, stops, prior_std)
    plain = statistics.fmean(finished + stops)
    assert plain <= moments.mean * (1 + 1e-9) < 1e15
    assert moments.variance is None if len(finished + stops) < 2 else 0 <= moments.variance < 1e30
    assert 0 <= moments.spread < 1e30
    assert 0 <= moments.log_squares < 1e6


@pytest.mark.parametrize(
    ("finished", "stops"),
    [([100] * 8, [100] * 8), ([0], [0]), ([1], [10**6] * 7), ([5], [5] * 500), ([1, 1, 1], [2**31])],
)
@pytest.mark.parametrize("prior_std", [0.0, 0.7, math.inf])
def test_fits_stay_within_their_bounds(finished, stops, prior_std):
    fit = fit_log_lengths(finished, stops, prior_std)
    assert MIN_LOG_STD <= fit.std <= MAX_LOG_STD
    assert math.isfinite(fit.location)


@settings(max_examples=30, deadline=None)
@given(usual_lengths, st.lists(st.integers(20, 4000), min_size=1, max_size=6), st.floats(0.2, 1.0))
def test_no_neighbouring_fit_is_more_likely(finished, stops, prior_std):
    fit = fit_log_lengths(finished, stops, prior_std)

    def log_posterior(location: float, std: float) -> float:
        normal = NormalDist(location, std)
        likelihood = sum(math.log(normal.pdf(math.log(x))) for x in finished)
        likelihood += sum(math.log(1 - normal.cdf(math.log(x))) for x in stops)
        return likelihood - LOG_STD_PRIOR_WEIGHT * (math.log(std) + prior_std**2 / (2 * std**2))

    best = log_posterior(fit.location, fit.std)
    for step in (-0.05, 0.05):
        assert log_posterior(fit.location + step, fit.std) < best
        if MIN_LOG_STD < fit.std + step < MAX_LOG_STD:
            assert log_posterior(fit.location, fit.std + step) < best


@pytest.mark.parametrize("log_std", [0.3, 0.8, 1.5])
@pytest.mark.parametrize("stop", [0, 50, 400, 3000])
def test_a_censored_length_counts_with_its_conditional_moments(log_std, stop):
    """Against the mean over 20,000 quantiles of the part beyond the stop."""
    normal = NormalDist(math.log(MEDIAN), log_std)
    below = normal.cdf(math.log(stop)) if stop else 0.0
    num = 20_000
    beyond = [math.exp(normal.inv_cdf(below + (1 - below) * (i + 0.5) / num)) for i in range(num)]
    mean, variance = moments_beyond(LogLengthFit(math.log(MEDIAN), log_std, 0.0), stop)
    assert mean == pytest.approx(statistics.fmean(beyond), rel=0.01)
    assert math.sqrt(variance) == pytest.approx(statistics.pstdev(beyond), rel=0.05)


def test_if_none_finished_it_was_an_even_chance():
    stops = [100, 100, 200, 300]
    fit = fit_log_lengths([], stops, 0.6)
    assert fit.std == 0.6
    normal = NormalDist(fit.location, fit.std)
    assert math.prod(1 - normal.cdf(math.log(stop)) for stop in stops) == pytest.approx(0.5)


def test_spread_of_logs_needs_two_that_finished():
    assert group_moments([100], [100] * 7, 0.7)[3:] == (0.0, 0)
    assert group_moments([100, 200], [], 0.7)[3:] == (pytest.approx(math.log(2) ** 2 / 2), 1)
    assert group_moments([100, 200], [200] * 2, 0.7).log_freedom == 3


def test_survival_goes_on_where_erfc_ends():
    assert log_survival(35.0) == pytest.approx(log_survival(35.0 - 1e-9), abs=1e-6)
    assert log_survival(0.0) == pytest.approx(math.log(0.5))
    assert log_survival(1e6) == pytest.approx(-5e11, rel=1e-6)


def test_many_different_stops_are_fitted_as_few_of_them_with_nearly_the_same_moments(monkeypatch):
    rng = random.Random(3)
    drawn = log_normal_lengths(rng, 0.8, 2000)
    finished, stops = drawn[::2], [max(1, round(length * rng.random())) for length in drawn[1::2]]
    counted = counted_stops(stops)
    assert len(counted) == MAX_STOPS
    assert sum(count for _, count in counted) == len(stops)
    few = group_moments(finished, stops, 0.7)
    monkeypatch.setattr("vllm_rollout.parts.shaping.rules.censoring.MAX_STOPS", len(stops))
    all_of_them = group_moments(finished, stops, 0.7)
    assert few.mean == pytest.approx(all_of_them.mean, rel=0.01)
    assert math.sqrt(few.variance) == pytest.approx(math.sqrt(all_of_them.variance), rel=0.02)


@given(
    st.floats(-2, 12),
    st.floats(MIN_LOG_STD, MAX_LOG_STD),
    st.integers(0, 10_000_000),
    st.floats(1e-16, 1 - 2**-53),
    st.floats(1e-16, 1 - 2**-53),
)
def test_a_length_beyond_a_stop_is_as_long_and_the_longer_the_fewer_exceed_it(location, std, stop, one, other):
    fit = LogLengthFit(location, std, 0.0)
    longer, shorter = (length_beyond(fit, stop, share) for share in sorted((one, other)))
    assert stop * (1 - 1e-9) <= shorter <= longer * (1 + 1e-9)

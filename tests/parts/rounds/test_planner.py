"""The parallelism planner: preemptions of rounds -> tensor-parallel size."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.parts.rounds.rules import planner
from vllm_rollout.parts.rounds.rules.planner import (
    MAX_QUIET_ROUNDS,
    MIN_RISE,
    QUIET_ROUNDS,
    ParallelismDecision,
    ParallelismPlanner,
    RoundPressure,
    sizes_of,
)

PLANNER = ParallelismPlanner((1, 2, 4, 8), 1)
CANDIDATES = 1000


def past(size, num_preemptions, kind="short", *, run="run", kv_tokens=10_000, num_candidates=CANDIDATES):
    return RoundPressure(run, kind, size, num_candidates, num_preemptions, kv_tokens)


def test_the_first_round_runs_at_the_configured_size():
    assert ParallelismPlanner((1, 2, 4), 2).next_size([]) == ParallelismDecision(2, "start", 0.0)


def test_preemptions_where_there_were_none_double_the_size():
    quiet = [past(1, 0)] * 3
    assert PLANNER.next_size([*quiet, past(1, int(MIN_RISE * CANDIDATES) - 1)]).reason == "steady"
    assert PLANNER.next_size([*quiet, past(1, int(MIN_RISE * CANDIDATES))]) == ParallelismDecision(2, "rise", 0.0)


def test_the_first_round_after_a_doubling_makes_the_level_and_a_rise_above_it_doubles_again():
    grown = [past(1, 500), past(2, 1000)]
    assert PLANNER.next_size(grown) == ParallelismDecision(2, "settling", 1.0)
    grown[-1] = past(2, 100)
    assert PLANNER.next_size([*grown, past(2, 149)]) == ParallelismDecision(2, "steady", 0.1)
    assert PLANNER.next_size([*grown, past(2, 151)]) == ParallelismDecision(4, "rise", 0.1)


def test_above_a_level_in_thousands_a_rise_is_a_twentieth_of_it(monkeypatch):
    monkeypatch.setattr(planner, "HIGH_RATE", 10)
    grown = [past(1, 500), past(2, 2000)]
    assert PLANNER.next_size([*grown, past(2, 2100)]) == ParallelismDecision(2, "steady", 2.0)
    assert PLANNER.next_size([*grown, past(2, 2101)]) == ParallelismDecision(4, "rise", 2.0)


def test_a_rate_that_stays_too_high_is_a_rise_at_every_size_from_the_second_round_on():
    assert run_rounds(PLANNER, 7, lambda number, size: past(size, CANDIDATES // 2)) == [1, 2, 2, 4, 4, 8, 8]


def test_a_ramp_that_the_level_follows_is_seen_when_the_rate_is_high():
    sizes = run_rounds(PLANNER, 42, lambda number, size: past(size, 5 * number if size == 1 else 0))
    assert sizes == [1] * 41 + [2]


def test_the_level_is_the_mean_of_the_newest_four_rounds():
    history = [past(1, 500), *(past(2, num) for num in (190, 10, 30, 50, 70))]
    assert PLANNER.next_size([*history, past(2, 89)]) == ParallelismDecision(2, "steady", 0.04)
    assert PLANNER.next_size([*history, past(2, 91)]) == ParallelismDecision(4, "rise", 0.04)


def test_short_and_long_rounds_and_rounds_of_several_runs_have_levels_of_their_own():
    period = [past(2, 179), past(2, 100, "long"), past(2, 10, run="other")]
    history = [past(1, 500), *period * 5]
    assert {PLANNER.next_size(history[:length]).size for length in range(2, len(history) + 1)} == {2}
    assert PLANNER.next_size([*history, past(2, 179, "long")]).size == 4


def test_four_rounds_without_preemptions_halve_the_size():
    planner = ParallelismPlanner((1, 2, 4), 4)
    quiet = [past(4, 0)] * QUIET_ROUNDS
    assert planner.next_size(quiet[1:]).reason == "steady"
    assert planner.next_size(quiet) == ParallelismDecision(2, "quiet", 0.0)
    assert planner.next_size([*quiet[1:], past(4, 1)]).reason == "steady"
    assert planner.next_size([past(4, 0), *quiet[1:], past(2, 0)]).reason == "steady"


def test_a_size_that_preempted_is_returned_to_under_fewer_tokens_only():
    grown = [past(1, 500, kv_tokens=10_000)]
    assert PLANNER.next_size(grown + [past(2, 0, kv_tokens=10_000)] * 8).reason == "failed_before"
    assert PLANNER.next_size(grown + [past(2, 0, kv_tokens=9_524)] * 4).reason == "failed_before"
    assert PLANNER.next_size(grown + [past(2, 0, kv_tokens=9_523)] * 4) == ParallelismDecision(1, "quiet", 0.0)


def test_a_size_that_would_be_slower_is_not_halved_to():
    quiet = [past(2, 0)] * QUIET_ROUNDS
    for smaller_s, reason in ((1.04, "quiet"), (1.06, "slower_below")):
        assert PLANNER.next_size(quiet, {1: smaller_s, 2: 1.0}.__getitem__).reason == reason
    # Only a halving asks: a size that is not profiled is no obstacle to growing.
    assert PLANNER.next_size([past(2, 0), past(2, 500)], {}.__getitem__).reason == "rise"


def test_a_halving_that_was_undone_makes_the_next_one_wait_twice_as_long():
    quiet = [past(2, 0, kv_tokens=5_000)] * QUIET_ROUNDS
    undone = [*quiet, past(1, 100)]
    for num_undone in range(1, 6):
        num_quiet = min(QUIET_ROUNDS << num_undone, MAX_QUIET_ROUNDS)
        waited = [*undone * num_undone, *[past(2, 0, kv_tokens=5_000)] * num_quiet]
        assert PLANNER.next_size(waited[:-1]).reason == "steady"
        assert PLANNER.next_size(waited) == ParallelismDecision(1, "quiet", 0.0)


def test_at_its_bounds_it_stays_and_says_so():
    planner = ParallelismPlanner((2, 4), 4)
    assert planner.next_size([past(4, 500)]) == ParallelismDecision(4, "at_largest", 0.0)
    assert planner.next_size([past(2, 0)] * QUIET_ROUNDS) == ParallelismDecision(2, "at_smallest", 0.0)


def test_sizes_are_powers_of_two_that_divide_the_heads():
    assert sizes_of(8, 32) == (1, 2, 4, 8)
    assert sizes_of(7, 32) == (1, 2, 4)
    assert sizes_of(8, 14) == (1, 2)


def run_rounds(planner, num_rounds, pressure):
    """Sizes of so many rounds; `pressure(number, size)` is what a round asks."""
    history = []
    for number in range(num_rounds):
        decision = planner.next_size(history)
        history.append(pressure(number, decision.size))
    return [each.size for each in history]


planners = st.integers(0, 3).flatmap(
    lambda low: st.integers(low, 5).flatmap(
        lambda high: st.integers(low, high).map(
            lambda start: ParallelismPlanner(tuple(1 << each for each in range(low, high + 1)), 1 << start)
        )
    )
)


asked_of_a_round = st.tuples(
    st.sampled_from(["a", "b"]), st.sampled_from(["short", "long"]), st.integers(0, 5000), st.integers(0, 10**6)
)


@given(planners, st.lists(asked_of_a_round, max_size=40))
def test_whatever_rounds_ask_the_size_is_allowed_and_changes_by_one_step(planner, asked):
    def pressure(number, size):
        run, kind, num_preemptions, kv_tokens = asked[number]
        return past(size, num_preemptions, kind, run=run, kv_tokens=kv_tokens)

    sizes = run_rounds(planner, len(asked), pressure)
    places = [planner.allowed_sizes.index(size) for size in sizes]
    assert all(abs(left - right) <= 1 for left, right in pairwise(places))


@given(planners, st.integers(1, 10**6))
def test_without_preemptions_it_ends_at_the_smallest_size(planner, kv_tokens):
    num_rounds = QUIET_ROUNDS * len(planner.allowed_sizes) + 1
    sizes = run_rounds(planner, num_rounds, lambda number, size: past(size, 0, kv_tokens=kv_tokens))
    assert sizes[-1] == planner.allowed_sizes[0]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.thorough
@given(planners, st.lists(st.integers(1, 10**6), min_size=1, max_size=5), st.floats(1, 10**6), st.floats(0, 10))
def test_a_load_that_repeats_does_not_make_it_flap(planner, period, tokens_per_device, rate):
    """Rounds preempt for what does not fit: a period of rounds that comes again and again."""

    def pressure(number, size):
        kv_tokens = period[number % len(period)]
        missing = max(0.0, kv_tokens / (tokens_per_device * size) - 1)
        kind = "long" if number % len(period) == len(period) - 1 else "short"
        return past(size, int(CANDIDATES * rate * missing), kind, kv_tokens=kv_tokens)

    sizes = run_rounds(planner, 240, pressure)
    assert len(set(sizes[-60:])) == 1


@pytest.mark.parametrize(("period", "num_changes"), [(60, 0), (80, 2)])
def test_a_load_that_repeats_after_more_quiet_rounds_than_any_halving_waits_for_goes_on_changing_the_size(
    period, num_changes
):
    def pressure(number, size):
        is_full = number % period == period - 1
        return past(size, 500 * (is_full and size == 1), kv_tokens=10_000 if is_full else 5_000)

    sizes = run_rounds(ParallelismPlanner((1, 2), 1), 20 * period, pressure)
    last = sizes[-period - 1 :]
    assert sum(left != right for left, right in pairwise(last)) == num_changes

"""What `benchmarks.rewards.limits` draws and counts."""

import asyncio

import pytest

from benchmarks.rewards.limits import CLOCKS, RUNS_PER_CASE, Run, Sizes, Timed, drawn, graded, killed_as_drawn, summary
from vllm_rollout.rewards import Grade


def test_what_hangs_comes_after_runs_that_teach_its_limit():
    runs = drawn(Sizes(cases=50, spread=0.1, hanging_share=0.1), seed=0)
    assert len(runs) == 50 * RUNS_PER_CASE
    assert {run.hang for run in runs} == {None, "sleeps", "spins"}
    assert not any(run.hang for index, run in enumerate(runs) if index % RUNS_PER_CASE < RUNS_PER_CASE // 2)


def test_correct_runs_that_were_killed_are_a_share_of_the_correct_ones():
    ok, killed = Grade("ok", 1.0), Grade("timeout", 0.0)
    runs = [Run(0, 0.1, 0.0, None)] * 4 + [Run(0, 0.1, 0.0, "spins")]
    timed = [Timed(ok, 3, 0.1)] * 3 + [Timed(killed, 0.2, 0.3), Timed(killed, 0.5, 1.0)]
    row = summary(runs, timed)
    assert (row["num_killed"], row["killed_share"], row["spins"]["median_limits"]) == (1, 0.25, 2.0)


def test_the_rule_ends_none_of_equal_runs_and_some_of_very_different_ones(monkeypatch):
    monkeypatch.setattr("benchmarks.rewards.limits.DRAWN_CASES", 500)
    assert killed_as_drawn(0.0, 1.5, seed=0) == killed_as_drawn(0.3, 9, seed=0) == 0 < killed_as_drawn(0.5, 1.5, seed=0)


@pytest.mark.parametrize("clock", CLOCKS)
def test_each_clock_ends_what_spins_and_lets_the_others_pass(clock):
    runs = [Run(0, 0.01, 0.01, None), Run(0, 0.01, 0.01, "spins"), Run(1, 0.01, 0.01, None)]
    assert [each.grade.status for each in asyncio.run(graded(runs, clock, 1))] == ["ok", "timeout", "ok"]

"""Workloads against the predictions of lengths, and the bound that holds in one of them that means alone break."""

from benchmarks.moves_adversarial import KINDS, measure, row, workload
from vllm_rollout.group import migration


def test_workloads_are_of_all_kinds_and_the_same_for_the_same_number():
    assert {workload(number).kind for number in range(len(KINDS))} == set(KINDS)
    assert workload(5) == workload(5) != workload(12)


def test_a_third_that_runs_to_the_cap_is_later_by_what_is_allowed_only():
    steps = [one for one in measure(95) if one["way"] == "consolidate"]
    assert [one["time_against_staying"] <= 1 + migration.MAX_DELAY for one in steps] == [True, True]
    assert row(steps[:1])["over_bound"] == 0

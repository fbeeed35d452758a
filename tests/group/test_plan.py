import math

import pytest

from vllm_rollout.config import MAX_GROUP_SIZE
from vllm_rollout.group.plans.plan import GroupPlan, make_plan
from vllm_rollout.group.plans.rows import PlanError


def test_a_plan_with_defaults_races_for_the_first():
    plan = make_plan(8, max_candidates=8)
    assert plan == GroupPlan(group_size=8, redundancy=0, early_stop=True, selection="first", num_longest=0)
    assert plan.num_candidates == 8


def test_spare_candidates_come_on_top_of_the_group():
    assert make_plan(8, 8, max_candidates=16).num_candidates == 16


def test_early_stop_may_be_turned_off():
    assert make_plan(2, 2, False, max_candidates=4).early_stop is False
    assert make_plan(2, 2, True, "shortest", max_candidates=4).early_stop is True


def test_dual_end_runs_the_whole_pool_and_keeps_one_long_trajectory_unless_told():
    assert make_plan(4, 4, selection="dual_end", max_candidates=8) == GroupPlan(4, 4, False, "dual_end", 1)
    assert make_plan(4, 4, False, "dual_end", 0, max_candidates=8).num_longest == 0
    assert make_plan(4, 4, None, "dual_end", 3, max_candidates=8).num_longest == 3


def test_a_dual_end_selection_of_one_takes_the_shortest():
    assert make_plan(1, 3, selection="dual_end", max_candidates=8) == GroupPlan(1, 3, False, "dual_end", 0)
    with pytest.raises(PlanError, match=r"^num_longest: must be below group_size \(1\), got 1: .*for 0"):
        make_plan(1, 3, selection="dual_end", num_longest=1, max_candidates=8)


@pytest.mark.parametrize("early_stop", [None, "auto"])
def test_early_stop_goes_where_the_selection_allows_it(early_stop):
    assert make_plan(2, 2, early_stop, "shortest", max_candidates=4).early_stop
    assert not make_plan(2, 2, early_stop, "dual_end", max_candidates=4).early_stop


def test_patience_bounds_the_wait_of_a_dual_end_selection():
    plan = make_plan(4, 4, selection="dual_end", patience=1.5, max_candidates=8)
    assert plan == GroupPlan(4, 4, False, "dual_end", 1, patience=1.5)
    assert make_plan(4, 4, selection="dual_end", patience=1, max_candidates=8).patience == 1


def test_a_prompt_whose_tail_is_not_extreme_keeps_its_selection():
    plan = make_plan(4, 4, selection="dual_end", patience=1.5, max_candidates=8)
    assert plan.allocated(8, extreme=False) == GroupPlan(4, 4, False, "dual_end", 1, patience=1.5)


def test_a_prompt_with_an_extreme_tail_takes_the_shortest_and_stops_early():
    plan = make_plan(4, 4, selection="dual_end", patience=1.5, max_candidates=8)
    assert plan.allocated(8, extreme=True) == GroupPlan(4, 4, True, "shortest")
    assert plan.allocated(8, extreme=True, early_stop=False) == GroupPlan(4, 4, False, "shortest")


def test_the_largest_group_is_allowed():
    assert make_plan(MAX_GROUP_SIZE, max_candidates=MAX_GROUP_SIZE).group_size == MAX_GROUP_SIZE


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"group_size": 0}, "group_size", ["got 0", f"1 to {MAX_GROUP_SIZE}"]),
        ({"group_size": MAX_GROUP_SIZE + 1}, "group_size", [f"got {MAX_GROUP_SIZE + 1}", f"1 to {MAX_GROUP_SIZE}"]),
        ({"redundancy": -1}, "redundancy", ["got -1", f"0 to {MAX_GROUP_SIZE}"]),
        ({"redundancy": 13}, "redundancy", ["4 + 13 = 17", "max_num_seqs (16)", "--max-num-seqs 17"]),
        ({"group_size": 20}, "group_size", ["20 + 0 = 20", "max_num_seqs (16)", "--max-num-seqs 20"]),
        ({"selection": "longest"}, "selection", ["got 'longest'", "first, shortest, dual_end"]),
        ({"num_longest": 1}, "num_longest", ["selection 'first'", "dual_end"]),
        ({"selection": "dual_end", "num_longest": 4}, "num_longest", ["got 4", "below group_size (4)"]),
        ({"selection": "dual_end", "num_longest": -1}, "num_longest", ["got -1", f"0 to {MAX_GROUP_SIZE}"]),
        ({"selection": "dual_end", "early_stop": True}, "early_stop", ["true", "dual_end", "false", '"auto"']),
        ({"patience": 2.0}, "patience", ["selection 'first'", "dual_end"]),
        ({"selection": "shortest", "patience": 2.0}, "patience", ["selection 'shortest'", "dual_end"]),
        ({"selection": "dual_end", "patience": 0.99}, "patience", ["got 0.99", "[1, 1000]"]),
        ({"selection": "dual_end", "patience": 1001}, "patience", ["got 1001", "[1, 1000]", "whole pool"]),
        ({"selection": "dual_end", "patience": math.nan}, "patience", ["got nan"]),
        ({"selection": "dual_end", "patience": math.inf}, "patience", ["got inf"]),
    ],
)
def test_a_field_out_of_range_is_named_with_its_value_and_what_is_allowed(fields, field, said):
    with pytest.raises(PlanError) as error:
        make_plan(**{"group_size": 4, "max_candidates": 16, **fields})
    assert error.value.field == field
    assert str(error.value).startswith(f"{field}: ")
    for part in said:
        assert part in str(error.value)

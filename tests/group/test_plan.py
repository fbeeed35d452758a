import math

import pytest

from vllm_rollout.config import MAX_GROUP_SIZE
from vllm_rollout.group.plan import GroupJoin, GroupPlan, PlanError, make_plan, plan_from_xargs, rollout_xargs


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
    with pytest.raises(PlanError, match=r"^num_longest: must be at least 0 and below group_size \(1\), got 1: .*for 0"):
        make_plan(1, 3, selection="dual_end", num_longest=1, max_candidates=8)


@pytest.mark.parametrize("early_stop", [None, "auto"])
def test_early_stop_goes_where_the_selection_allows_it(early_stop):
    assert make_plan(2, 2, early_stop, "shortest", max_candidates=4).early_stop
    assert not make_plan(2, 2, early_stop, "dual_end", max_candidates=4).early_stop


def test_patience_bounds_the_wait_of_a_dual_end_selection():
    plan = make_plan(4, 4, selection="dual_end", patience=1.5, max_candidates=8)
    assert plan == GroupPlan(4, 4, False, "dual_end", 1, patience=1.5)
    assert make_plan(4, 4, selection="dual_end", patience=1, max_candidates=8).patience == 1


def test_a_prompt_below_the_upper_bound_keeps_its_selection():
    plan = make_plan(4, 4, selection="dual_end", patience=1.5, max_candidates=8)
    assert plan.allocated(6, at_upper_bound=False) == GroupPlan(4, 2, False, "dual_end", 1, patience=1.5)


def test_a_prompt_at_the_upper_bound_takes_the_shortest_and_stops_early():
    plan = make_plan(4, 4, selection="dual_end", patience=1.5, max_candidates=8)
    assert plan.allocated(8, at_upper_bound=True) == GroupPlan(4, 4, True, "shortest")
    assert plan.allocated(8, at_upper_bound=True, early_stop=False) == GroupPlan(4, 4, False, "shortest")


def test_the_largest_group_is_allowed():
    assert make_plan(MAX_GROUP_SIZE, max_candidates=MAX_GROUP_SIZE).group_size == MAX_GROUP_SIZE


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"group_size": 0}, "group_size", ["got 0", f"[1, {MAX_GROUP_SIZE}]"]),
        ({"group_size": MAX_GROUP_SIZE + 1}, "group_size", [f"got {MAX_GROUP_SIZE + 1}", f"[1, {MAX_GROUP_SIZE}]"]),
        ({"redundancy": -1}, "redundancy", ["got -1", "at least 0", "group_size"]),
        ({"redundancy": 13}, "redundancy", ["4 + 13 = 17", "max_num_seqs (16)", "--max-num-seqs 17"]),
        ({"group_size": 20}, "group_size", ["20 + 0 = 20", "max_num_seqs (16)", "--max-num-seqs 20"]),
        ({"selection": "longest"}, "selection", ["got 'longest'", "first, shortest, dual_end"]),
        ({"num_longest": 1}, "num_longest", ["selection 'first'", "dual_end"]),
        ({"selection": "dual_end", "num_longest": 4}, "num_longest", ["got 4", "below group_size (4)"]),
        ({"selection": "dual_end", "num_longest": -1}, "num_longest", ["got -1", "at least 0"]),
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


def test_only_our_fields_are_taken_from_the_xargs():
    xargs = {"rollout_redundancy": 2, "top_k": 3, "vllm_rollout": []}
    assert rollout_xargs(xargs) == {"rollout_redundancy": 2}


def test_flat_fields_make_the_plan_of_the_request_s_own_group():
    dual_end = {"rollout_selection": "dual_end", "rollout_num_longest": 2, "rollout_early_stop": 0}
    assert plan_from_xargs(dual_end, 4, max_candidates=8) == GroupPlan(4, 0, False, "dual_end", 2)
    assert plan_from_xargs({"rollout_redundancy": 2.0}, 1, max_candidates=8) == GroupPlan(1, 2)
    assert plan_from_xargs({"rollout_early_stop": True}, 3, max_candidates=8) == GroupPlan(3)
    patient = {"rollout_selection": "dual_end", "rollout_early_stop": "auto", "rollout_patience": 2}
    assert plan_from_xargs(patient, 4, max_candidates=8) == GroupPlan(4, 0, False, "dual_end", 1, patience=2)


@pytest.mark.parametrize(
    ("xargs", "field", "said"),
    [
        ({"rollout_redundancy": -1}, "rollout_redundancy", ["got -1", "at least 0", "beyond n"]),
        ({"rollout_redundancy": 9}, "rollout_redundancy", ["n + rollout_redundancy", "4 + 9 = 13", "(8)"]),
        ({"rollout_redundancy": "2"}, "rollout_redundancy", ["integer", "got '2'"]),
        ({"rollout_redundancy": 1.5}, "rollout_redundancy", ["integer", "got 1.5"]),
        ({"rollout_redundancy": math.inf}, "rollout_redundancy", ["integer", "got inf"]),
        ({"rollout_redundancy": True}, "rollout_redundancy", ["integer", "got True"]),
        ({"rollout_early_stop": "yes"}, "rollout_early_stop", ["true or false", "got 'yes'"]),
        ({"rollout_early_stop": 2}, "rollout_early_stop", ["true or false", "got 2"]),
        ({"rollout_selection": "best"}, "rollout_selection", ["first, shortest, dual_end", "got 'best'"]),
        ({"rollout_selection": ["first"]}, "rollout_selection", ["first, shortest, dual_end", "got ['first']"]),
        ({"rollout_num_longest": 1}, "rollout_num_longest", ["dual_end", "'first'"]),
        (
            {"rollout_selection": "dual_end", "rollout_num_longest": 5},
            "rollout_num_longest",
            ["got 5", "below n (4)", "n - rollout_num_longest"],
        ),
        ({"rollout_selection": "dual_end", "rollout_early_stop": 1}, "rollout_early_stop", ["dual_end"]),
        ({"rollout_patience": 2}, "rollout_patience", ["dual_end", "'first'"]),
        ({"rollout_selection": "dual_end", "rollout_patience": "2"}, "rollout_patience", ["number", "got '2'"]),
        ({"rollout_selection": "dual_end", "rollout_patience": True}, "rollout_patience", ["number", "got True"]),
        ({"rollout_group_size": 4}, "rollout_group_size", ["rollout_redundancy", "rollout_selection"]),
        ({"rollout_redundency": 4}, "rollout_redundency", ["rollout_redundancy"]),
    ],
)
def test_a_wrong_xarg_is_named_as_the_user_wrote_it(xargs, field, said):
    with pytest.raises(PlanError) as error:
        plan_from_xargs(xargs, 4, max_candidates=8)
    assert error.value.field == field
    assert str(error.value).startswith(f"{field}: ")
    for part in said:
        assert part in str(error.value)


def test_more_choices_than_the_server_runs_at_once_is_said_of_n():
    message = r"^n: n \+ rollout_redundancy must be at most .*\(8\), got 9 \+ 0 = 9"
    with pytest.raises(PlanError, match=message) as error:
        plan_from_xargs({"rollout_early_stop": 1}, 9, max_candidates=8)
    assert error.value.field == "n"


def test_a_group_id_makes_the_request_a_member_of_a_shared_group():
    xargs = {"rollout_group_id": "q1", "rollout_group_size": 4}
    assert plan_from_xargs(xargs, 1, max_candidates=8) == GroupJoin("q1", 4, 4, True)
    xargs |= {"rollout_num_candidates": 6.0, "rollout_early_stop": 0}
    assert plan_from_xargs(xargs, 1, max_candidates=8) == GroupJoin("q1", 4, 6, False)


JOIN = {"rollout_group_id": "q1", "rollout_group_size": 4}


@pytest.mark.parametrize(
    ("xargs", "n", "field", "said"),
    [
        (JOIN | {"rollout_group_id": ""}, 1, "rollout_group_id", ["1 to 256", "got ''"]),
        (JOIN | {"rollout_group_id": 7}, 1, "rollout_group_id", ["string", "got 7"]),
        (JOIN | {"rollout_group_id": "x" * 257}, 1, "rollout_group_id", ["1 to 256"]),
        (JOIN, 2, "rollout_group_id", ["n is 2", "n=1"]),
        ({"rollout_group_id": "q1"}, 1, "rollout_group_size", ["required"]),
        (JOIN | {"rollout_group_size": 0}, 1, "rollout_group_size", ["got 0", "between 1 and"]),
        (JOIN | {"rollout_group_size": "4"}, 1, "rollout_group_size", ["integer", "got '4'"]),
        (JOIN | {"rollout_num_candidates": 3}, 1, "rollout_num_candidates", ["got 3", "rollout_group_size (4)"]),
        (JOIN | {"rollout_num_candidates": 9}, 1, "rollout_num_candidates", ["9", "max_num_seqs (8)"]),
        (JOIN | {"rollout_group_size": 9}, 1, "rollout_group_size", ["9", "max_num_seqs (8)"]),
        (JOIN | {"rollout_redundancy": 2}, 1, "rollout_redundancy", ["allowed here", "rollout_num_candidates"]),
        (JOIN | {"rollout_early_stop": "no"}, 1, "rollout_early_stop", ["got 'no'"]),
    ],
)
def test_a_wrong_membership_is_refused_by_its_field(xargs, n, field, said):
    with pytest.raises(PlanError) as error:
        plan_from_xargs(xargs, n, max_candidates=8)
    assert error.value.field == field
    for part in said:
        assert part in str(error.value)


def test_too_many_siblings_are_refused_with_the_number_the_user_wrote():
    with pytest.raises(PlanError) as error:
        plan_from_xargs(JOIN | {"rollout_num_candidates": 12}, 1, max_candidates=8)
    # num_candidates counts all siblings already: a sum with group_size would name a value nobody sent.
    assert "got 12" in str(error.value)
    assert "rollout_group_size + rollout_num_candidates" not in str(error.value)


@pytest.mark.parametrize("field", ["rollout_num_candidates", "rollout_early_stop"])
def test_a_null_field_of_a_membership_means_its_default(field):
    assert plan_from_xargs(JOIN | {field: None}, 1, max_candidates=8) == GroupJoin("q1", 4, 4, True)

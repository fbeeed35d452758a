"""Flat fields of OpenAI requests: what they mean, and how a wrong one is refused."""

import pytest

from vllm_rollout.kernel.rules.plan import GroupJoin, GroupPlan
from vllm_rollout.kernel.rules.rows import PlanError
from vllm_rollout.kernel.xargs import ALL_ROWS, NAMES, plan_from_xargs, rollout_xargs

JOIN = {"rollout_group_id": "q1", "rollout_group_size": 4}
NULLS = ("rollout_num_candidates", "rollout_early_stop", "rollout_namespace")


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
    ("xargs", "n", "field", "said"),
    [
        ({"rollout_redundancy": 9}, 4, "rollout_redundancy", ["n + rollout_redundancy", "4 + 9 = 13", "(8)"]),
        ({"rollout_num_longest": 1}, 4, "rollout_num_longest", ["dual_end", "'first'"]),
        (
            {"rollout_selection": "dual_end", "rollout_num_longest": 5},
            4,
            "rollout_num_longest",
            ["got 5", "below n (4)", "n - rollout_num_longest"],
        ),
        ({"rollout_selection": "dual_end", "rollout_early_stop": 1}, 4, "rollout_early_stop", ["dual_end"]),
        ({"rollout_patience": 2}, 4, "rollout_patience", ["dual_end", "'first'"]),
        ({"rollout_patience": 10**400}, 4, "rollout_patience", ["must be a number in [1, 1000], got 1000"]),
        ({"rollout_num_candidates": 4}, 4, "rollout_num_candidates", ["needs rollout_group_size"]),
        ({"rollout_group_size": 4}, 4, "rollout_group_size", ["n is 4", "n=1"]),
        ({"rollout_redundency": 4}, 4, "rollout_redundency", ["rollout_redundancy"]),
        ({"rollout_namespace": "run-7", "rollout_redundancy": 1}, 4, "rollout_namespace", ["needs rollout_group_size"]),
        ({"rollout_priority": 1}, 4, "rollout_priority", ["is not a field"]),
        (JOIN | {"rollout_order": "prompts"}, 1, "rollout_order", ["is not a field"]),
        ({"rollout_early_stop": 1}, 9, "n", ["n + rollout_redundancy must be at most", "(8), got 9 + 0 = 9"]),
        (JOIN, 2, "rollout_group_id", ["n is 2", "n=1"]),
        ({"rollout_group_id": "q1"}, 1, "rollout_group_size", ["required"]),
        (JOIN | {"rollout_num_candidates": 3}, 1, "rollout_num_candidates", ["got 3", "rollout_group_size (4)"]),
        (JOIN | {"rollout_num_candidates": 9}, 1, "rollout_num_candidates", ["got 9", "max_num_seqs (8)"]),
        (JOIN | {"rollout_group_size": 9}, 1, "rollout_group_size", ["9", "max_num_seqs (8)"]),
        (JOIN | {"rollout_redundancy": 2}, 1, "rollout_redundancy", ["allowed here", "rollout_num_candidates"]),
    ],
)
def test_a_wrong_xarg_is_named_as_the_user_wrote_it(xargs, n, field, said):
    assert_refused(xargs, n, field, said)


def assert_refused(xargs, n, field, said):
    with pytest.raises(PlanError) as error:
        plan_from_xargs(xargs, n, max_candidates=8)
    assert error.value.field == field
    assert str(error.value).startswith(f"{field}: ")
    for part in said:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("xargs", "join"),
    [
        (JOIN, GroupJoin(4, 4, name="q1")),
        (JOIN | dict.fromkeys(NULLS), GroupJoin(4, 4, name="q1")),
        (JOIN | {"rollout_num_candidates": 6.0, "rollout_early_stop": 0}, GroupJoin(4, 6, False, name="q1")),
        (JOIN | {"rollout_namespace": "run-7"}, GroupJoin(4, 4, name="q1", namespace="run-7")),
        ({"rollout_group_id": None, "rollout_group_size": 4, "rollout_num_candidates": 6}, GroupJoin(4, 6)),
    ],
)
def test_a_group_size_makes_the_request_a_member_of_a_shared_group(xargs, join):
    assert plan_from_xargs(xargs, 1, max_candidates=8) == join


def test_fields_have_different_names_among_the_xargs():
    assert len(set(NAMES.values())) == len(ALL_ROWS)

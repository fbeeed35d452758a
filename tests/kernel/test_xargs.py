"""Flat fields of OpenAI requests: what they mean, and how a wrong one is refused."""

import math

import pytest

from tests.support.steps import pruned_by
from vllm_rollout.kernel.rules.fields import ROWS
from vllm_rollout.kernel.rules.plan import GroupJoin, GroupPlan
from vllm_rollout.kernel.rules.rows import PlanError
from vllm_rollout.kernel.xargs import NAMES, PRUNING_XARGS, audit_ratio_from_xargs, plan_from_xargs, rollout_xargs
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan
from vllm_rollout.parts.pruning.rules.step import TERMS
from vllm_rollout.parts.pruning.rules.terms import PruningTerms

JOIN = {"rollout_group_id": "q1", "rollout_group_size": 4}
SPARE = {"rollout_redundancy": 4, "rollout_detection_length": 8}
NULLS = ("rollout_num_candidates", "rollout_early_stop", "rollout_namespace")
PRUNED_JOIN = {"rollout_group_id": "q", "rollout_group_size": 2, "rollout_num_candidates": 4}


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
        ({"rollout_redundancy": -1}, 4, "rollout_redundancy", ["got -1", "0 to 4096"]),
        ({"rollout_redundancy": 9}, 4, "rollout_redundancy", ["n + rollout_redundancy", "4 + 9 = 13", "(8)"]),
        ({"rollout_redundancy": "2"}, 4, "rollout_redundancy", ["integer", "got '2'"]),
        ({"rollout_redundancy": 1.5}, 4, "rollout_redundancy", ["integer", "got 1.5"]),
        ({"rollout_redundancy": math.inf}, 4, "rollout_redundancy", ["integer", "got inf"]),
        ({"rollout_redundancy": True}, 4, "rollout_redundancy", ["integer", "got True"]),
        ({"rollout_early_stop": "yes"}, 4, "rollout_early_stop", ["true or false", "got 'yes'"]),
        ({"rollout_early_stop": 2}, 4, "rollout_early_stop", ["true or false", "got 2"]),
        ({"rollout_selection": "best"}, 4, "rollout_selection", ["first, shortest, dual_end", "got 'best'"]),
        ({"rollout_selection": ["first"]}, 4, "rollout_selection", ["first, shortest, dual_end", "got ['first']"]),
        ({"rollout_num_longest": 1}, 4, "rollout_num_longest", ["dual_end", "'first'"]),
        (
            {"rollout_selection": "dual_end", "rollout_num_longest": 5},
            4,
            "rollout_num_longest",
            ["got 5", "below n (4)", "n - rollout_num_longest"],
        ),
        ({"rollout_selection": "dual_end", "rollout_early_stop": 1}, 4, "rollout_early_stop", ["dual_end"]),
        ({"rollout_patience": 2}, 4, "rollout_patience", ["dual_end", "'first'"]),
        ({"rollout_selection": "dual_end", "rollout_patience": "2"}, 4, "rollout_patience", ["number", "got '2'"]),
        ({"rollout_selection": "dual_end", "rollout_patience": True}, 4, "rollout_patience", ["number", "got True"]),
        ({"rollout_num_candidates": 4}, 4, "rollout_num_candidates", ["needs rollout_group_size"]),
        ({"rollout_group_size": 4}, 4, "rollout_group_size", ["n is 4", "n=1"]),
        ({"rollout_redundency": 4}, 4, "rollout_redundency", ["rollout_redundancy"]),
        ({"rollout_namespace": "run-7", "rollout_redundancy": 1}, 4, "rollout_namespace", ["needs rollout_group_size"]),
        ({"rollout_priority": 1}, 4, "rollout_priority", ["is not a field"]),
        (JOIN | {"rollout_order": "prompts"}, 1, "rollout_order", ["is not a field"]),
        ({"rollout_early_stop": 1}, 9, "n", ["n + rollout_redundancy must be at most", "(8), got 9 + 0 = 9"]),
        (JOIN | {"rollout_group_id": ""}, 1, "rollout_group_id", ["1 to 256", "got ''"]),
        (JOIN | {"rollout_group_id": 7}, 1, "rollout_group_id", ["string", "got 7"]),
        (JOIN | {"rollout_group_id": "x" * 257}, 1, "rollout_group_id", ["1 to 256"]),
        (JOIN, 2, "rollout_group_id", ["n is 2", "n=1"]),
        ({"rollout_group_id": "q1"}, 1, "rollout_group_size", ["required"]),
        (JOIN | {"rollout_namespace": "x" * 257}, 1, "rollout_namespace", ["a string of 1 to 256 characters"]),
        (JOIN | {"rollout_group_size": 0}, 1, "rollout_group_size", ["got 0", "1 to 4096"]),
        (JOIN | {"rollout_group_size": "4"}, 1, "rollout_group_size", ["integer", "got '4'"]),
        (JOIN | {"rollout_num_candidates": 3}, 1, "rollout_num_candidates", ["got 3", "rollout_group_size (4)"]),
        (JOIN | {"rollout_num_candidates": 9}, 1, "rollout_num_candidates", ["got 9", "max_num_seqs (8)"]),
        (JOIN | {"rollout_group_size": 9}, 1, "rollout_group_size", ["9", "max_num_seqs (8)"]),
        (JOIN | {"rollout_redundancy": 2}, 1, "rollout_redundancy", ["allowed here", "rollout_num_candidates"]),
        (JOIN | {"rollout_early_stop": "no"}, 1, "rollout_early_stop", ["got 'no'"]),
        (SPARE | {"rollout_detection_length": 0}, 4, "rollout_detection_length", ["got 0", "1 to"]),
        (SPARE | {"rollout_detection_length": "8"}, 4, "rollout_detection_length", ["integer", "got '8'"]),
        (SPARE | {"rollout_keep_ratio": 0}, 4, "rollout_keep_ratio", ["(0, 1]", "got 0"]),
        (SPARE | {"rollout_keep_ratio": "half"}, 4, "rollout_keep_ratio", ["(0, 1]", "got 'half'"]),
        (
            SPARE | {"rollout_min_survival": 1},
            4,
            "rollout_min_survival",
            ["most rollout_max_survival", "1 and 0.95"],
        ),
        (
            SPARE | {"rollout_keep_ratio": 0.96},
            4,
            "rollout_keep_ratio",
            ["rollout_max_survival", "0.96", "and 0.95"],
        ),
        (SPARE | {"rollout_allow_fewer": "yes"}, 4, "rollout_allow_fewer", ["true or false", "got 'yes'"]),
        (SPARE | {"rollout_min_labels": 1.5}, 4, "rollout_min_labels", ["integer", "got 1.5"]),
        (SPARE | {"rollout_pruning_mode": "on"}, 4, "rollout_pruning_mode", ["active, shadow", "got 'on'"]),
        (SPARE | {"rollout_mode": "shadow"}, 4, "rollout_mode", ["rollout_pruning_mode"]),
        (
            {"rollout_detection_length": 8},
            4,
            "rollout_allow_fewer",
            ["(rollout_redundancy)", "rollout_allow_fewer"],
        ),
        (
            PRUNED_JOIN | {"rollout_detection_length": 8, "rollout_num_candidates": 2},
            1,
            "rollout_allow_fewer",
            ["(rollout_num_candidates)", "all 2 candidates"],
        ),
    ],
)
def test_a_wrong_xarg_is_named_as_the_user_wrote_it(xargs, n, field, said):
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
        (
            PRUNED_JOIN | {"rollout_detection_length": 8, "rollout_keep_ratio": 0.5},
            GroupJoin(2, 4, name="q", parts=TERMS.value(PruningTerms(PruningPlan(8, keep_ratio=0.5)))),
        ),
    ],
)
def test_a_group_size_makes_the_request_a_member_of_a_shared_group(xargs, join):
    assert plan_from_xargs(xargs, 1, max_candidates=8) == join


def test_fields_have_different_names_among_the_xargs():
    assert len(set(NAMES.values())) == len(ROWS)


def test_flat_fields_turn_pruning_on():
    xargs = SPARE | {"rollout_keep_ratio": 0.25, "rollout_target_positive_ratio": 0.4, "rollout_pruning_rule": "paper"}
    xargs |= {"rollout_pruning_strength": 1, "rollout_min_survival": 0.1, "rollout_max_survival": 0.9}
    xargs |= {"rollout_pruning_mode": "shadow", "rollout_signal": "confidence", "rollout_allow_fewer": 1}
    xargs |= {"rollout_min_labels": 32.0}
    plan = plan_from_xargs(xargs, 4, max_candidates=8)
    pruning = PruningPlan(8, "paper", 0.25, 0.4, 1, 0.1, 0.9, "shadow", "confidence", True, 32)
    assert plan == GroupPlan(4, 4, parts=pruned_by(pruning))
    assert plan_from_xargs(SPARE, 4, max_candidates=8) == GroupPlan(4, 4, parts=pruned_by(PruningPlan(8)))


@pytest.mark.parametrize("others", [{}, PRUNED_JOIN])
def test_null_fields_of_pruning_mean_their_defaults(others):
    nothing = others | dict.fromkeys(PRUNING_XARGS.values())
    assert plan_from_xargs(nothing, 1, max_candidates=8).pruning is None
    some = nothing | {"rollout_detection_length": 8, "rollout_allow_fewer": True}
    assert plan_from_xargs(some, 1, max_candidates=8).pruning == PruningPlan(8, allow_fewer=True)


@pytest.mark.parametrize("name", [name for name in PRUNING_XARGS.values() if name != "rollout_detection_length"])
@pytest.mark.parametrize("others", [{}, PRUNED_JOIN])
def test_a_field_of_pruning_needs_the_detection_length(name, others):
    with pytest.raises(PlanError, match="needs rollout_detection_length, which turns pruning on") as error:
        plan_from_xargs(others | {name: 1}, 1, max_candidates=8)
    assert error.value.field == name


@pytest.mark.parametrize("others", [SPARE, PRUNED_JOIN | {"rollout_detection_length": 8}])
def test_what_learns_is_audited_as_it_says_or_as_the_server_does(others):
    assert audit_ratio_from_xargs(others, 0.05) == 0.05
    assert audit_ratio_from_xargs(others | {"rollout_audit_ratio": None}, 0.05) == 0.05
    assert audit_ratio_from_xargs(others | {"rollout_audit_ratio": 0}, 0.05) == 0.0
    assert audit_ratio_from_xargs(others | {"rollout_audit_ratio": 0.5}, 0.05) == 0.5
    without = {key: value for key, value in others.items() if key != "rollout_detection_length"}
    assert audit_ratio_from_xargs(without, 0.05) == 0.0
    n = 1 if "rollout_group_id" in others else 4
    assert plan_from_xargs(others | {"rollout_audit_ratio": 0.5}, n, max_candidates=8) == plan_from_xargs(
        others, n, max_candidates=8
    )


@pytest.mark.parametrize("value", [-0.1, 1.5, "0.5", True, math.nan])
def test_an_audit_ratio_is_a_share(value):
    with pytest.raises(PlanError, match=r"^rollout_audit_ratio: must be a number in \[0, 1\], got"):
        audit_ratio_from_xargs(SPARE | {"rollout_audit_ratio": value}, 0.05)
    with pytest.raises(PlanError, match=r"^rollout_audit_ratio: needs rollout_detection_length"):
        audit_ratio_from_xargs({"rollout_redundancy": 4, "rollout_audit_ratio": 0.1}, 0.05)

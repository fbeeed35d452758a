"""Fields of pruning and audits among the `vllm_xargs` of OpenAI requests."""

import pytest

from tests.kernel.test_xargs import assert_refused
from tests.parts.pruning.steps import pruned_by
from vllm_rollout.kernel.rules.plan import GroupJoin, GroupPlan
from vllm_rollout.kernel.rules.rows import PlanError, rows
from vllm_rollout.kernel.rules.terms_port import pruning_of
from vllm_rollout.kernel.xargs import NAMES, audit_ratio_from_xargs, plan_from_xargs
from vllm_rollout.parts.pruning.rules.fields import PruningFields
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan

SPARE = {"rollout_redundancy": 4, "rollout_detection_length": 8}
XARGS = [NAMES[field] for field in rows(PruningFields)]
PRUNED_JOIN = {"rollout_group_id": "q", "rollout_group_size": 2, "rollout_num_candidates": 4}


@pytest.mark.parametrize(
    ("xargs", "n", "field", "said"),
    [
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
def test_a_wrong_xarg_of_pruning_is_named_as_the_user_wrote_it(xargs, n, field, said):
    assert_refused(xargs, n, field, said)


def test_a_group_that_requests_share_has_the_terms_of_pruning():
    xargs = PRUNED_JOIN | {"rollout_detection_length": 8, "rollout_keep_ratio": 0.5}
    join = GroupJoin(2, 4, name="q", parts=pruned_by(PruningPlan(8, keep_ratio=0.5)))
    assert plan_from_xargs(xargs, 1, max_candidates=8) == join


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
    nothing = others | dict.fromkeys(XARGS)
    assert pruning_of(plan_from_xargs(nothing, 1, max_candidates=8).parts) is None
    some = nothing | {"rollout_detection_length": 8, "rollout_allow_fewer": True}
    assert pruning_of(plan_from_xargs(some, 1, max_candidates=8).parts) == PruningPlan(8, allow_fewer=True)


@pytest.mark.parametrize("name", [name for name in XARGS if name != "rollout_detection_length"])
@pytest.mark.parametrize("others", [{}, PRUNED_JOIN])
def test_a_field_of_pruning_needs_the_detection_length(name, others):
    with pytest.raises(PlanError, match="needs rollout_detection_length, which turns pruning on") as error:
        plan_from_xargs(others | {name: 1}, 1, max_candidates=8)
    assert error.value.field == name


@pytest.mark.parametrize("others", [SPARE, PRUNED_JOIN | {"rollout_detection_length": 8}])
def test_what_learns_is_audited_as_it_says_or_as_the_server_does(others):
    n = 1 if "rollout_group_id" in others else 4
    plan = plan_from_xargs(others, n, max_candidates=8)
    for said, ratio in (
        ({}, 0.05),
        ({"audit_ratio": None}, 0.05),
        ({"audit_ratio": 0}, 0.0),
        ({"audit_ratio": 0.5}, 0.5),
    ):
        xargs = {f"rollout_{name}": value for name, value in said.items()}
        assert audit_ratio_from_xargs(others | xargs, plan, 0.05) == ratio
    without = {key: value for key, value in others.items() if key != "rollout_detection_length"}
    assert audit_ratio_from_xargs(without, plan_from_xargs(without, n, max_candidates=8), 0.05) == 0.0
    assert plan_from_xargs(others | {"rollout_audit_ratio": 0.5}, n, max_candidates=8) == plan_from_xargs(
        others, n, max_candidates=8
    )


def test_an_audit_ratio_needs_pruning():
    with pytest.raises(PlanError, match=r"^rollout_audit_ratio: needs rollout_detection_length"):
        audit_ratio_from_xargs({"rollout_audit_ratio": 0.1}, GroupPlan(4, 4), 0.05)

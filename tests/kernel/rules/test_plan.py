import pytest

from vllm_rollout.config import MAX_GROUP_SIZE
from vllm_rollout.kernel.rules.plan import GroupPlan, make_plan
from vllm_rollout.kernel.rules.rows import PlanError

DUAL_END = {"selection": "dual_end"}


@pytest.mark.parametrize(
    ("fields", "plan"),
    [
        ({}, GroupPlan(4)),
        ({"redundancy": 4}, GroupPlan(4, 4)),
        ({"early_stop": False}, GroupPlan(4, early_stop=False)),
        ({"early_stop": True, "selection": "shortest"}, GroupPlan(4, selection="shortest")),
        ({"early_stop": "auto", "selection": "shortest"}, GroupPlan(4, selection="shortest")),
        (DUAL_END, GroupPlan(4, 0, False, "dual_end", 1)),
        (DUAL_END | {"early_stop": "auto"}, GroupPlan(4, 0, False, "dual_end", 1)),
        (DUAL_END | {"early_stop": False, "num_longest": 0}, GroupPlan(4, 0, False, "dual_end", 0)),
        (DUAL_END | {"num_longest": 3}, GroupPlan(4, 0, False, "dual_end", 3)),
        (DUAL_END | {"group_size": 1, "redundancy": 3}, GroupPlan(1, 3, False, "dual_end", 0)),
        (DUAL_END | {"patience": 1}, GroupPlan(4, 0, False, "dual_end", 1, patience=1)),
        ({"group_size": MAX_GROUP_SIZE}, GroupPlan(MAX_GROUP_SIZE)),
    ],
)
def test_fields_make_a_plan(fields, plan):
    assert make_plan(**{"group_size": 4, "max_candidates": MAX_GROUP_SIZE, **fields}) == plan
    assert plan.num_candidates == plan.group_size + plan.redundancy


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"redundancy": 13}, "redundancy", ["4 + 13 = 17", "max_num_seqs (16)", "--max-num-seqs 17"]),
        ({"group_size": 20}, "group_size", ["20 + 0 = 20", "max_num_seqs (16)", "--max-num-seqs 20"]),
        ({"num_longest": 1}, "num_longest", ["selection 'first'", "dual_end"]),
        ({"selection": "dual_end", "num_longest": 4}, "num_longest", ["got 4", "below group_size (4)"]),
        (
            {"selection": "dual_end", "group_size": 1, "num_longest": 1},
            "num_longest",
            ["group_size (1)", "for 0"],
        ),
        ({"selection": "dual_end", "early_stop": True}, "early_stop", ["true", "dual_end", "false", '"auto"']),
        ({"patience": 2.0}, "patience", ["selection 'first'", "dual_end"]),
        ({"selection": "shortest", "patience": 2.0}, "patience", ["selection 'shortest'", "dual_end"]),
    ],
)
def test_fields_that_do_not_fit_together_are_named_with_their_values_and_what_is_allowed(fields, field, said):
    with pytest.raises(PlanError) as error:
        make_plan(**{"group_size": 4, "max_candidates": 16, **fields})
    assert error.value.field == field
    assert str(error.value).startswith(f"{field}: ")
    for part in said:
        assert part in str(error.value)

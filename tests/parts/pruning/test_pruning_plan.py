import pytest

from tests.parts.pruning.steps import pruned_by
from tests.support.values import wrong
from vllm_rollout.config import CALIBRATION_WINDOW, MAX_DETECTION_LENGTH
from vllm_rollout.kernel.rules.plan import make_plan
from vllm_rollout.kernel.rules.rows import PlanError, rows
from vllm_rollout.parts.pruning.rules.fields import PruningFields
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan, make_pruning_plan


def test_the_defaults_are_within_their_ranges():
    plan = make_pruning_plan({"detection_length": MAX_DETECTION_LENGTH})
    assert plan == PruningPlan(MAX_DETECTION_LENGTH)
    assert all(row.takes.holds(getattr(plan, field)) for field, row in rows(PruningFields).items())


@pytest.mark.parametrize(
    "given",
    [
        *({"detection_length": length} for length in (1, MAX_DETECTION_LENGTH)),
        *({"keep_ratio": ratio} for ratio in (0.05, 0.95, 1)),
        *({"target_positive_ratio": ratio, "strength": 1000 * round(ratio)} for ratio in (1e-9, 1 - 1e-9)),
        *({"min_survival": bound, "max_survival": other} for bound, other in ((1e-9, 1), (0.5, 0.5))),
        {"keep_ratio": 1, "max_survival": 0.6},  # only scores
        *({"min_labels": num} for num in (1, CALIBRATION_WINDOW // 2)),
    ],
)
def test_the_ends_of_each_range_are_allowed(given):
    plan = make_pruning_plan({"detection_length": 8, **given})
    assert {field: getattr(plan, field) for field in given} == given


@pytest.mark.parametrize("field", rows(PruningFields))
def test_what_is_out_of_range_is_named_with_its_value_and_what_is_allowed(field):
    takes = rows(PruningFields)[field].takes
    for value in wrong(takes):
        with pytest.raises(PlanError) as error:
            make_pruning_plan({"detection_length": 8, field: value}, {field: f"pruning.{field}"})
        assert error.value.field == f"pruning.{field}"
        assert str(error.value).startswith(f"pruning.{field}: must be {takes.allowed}, got {value!r:.80}.")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("keep_ratio", 0),  # no candidate would be left
        ("max_survival", 0),
        ("min_survival", 0),  # a weight is one over it
        ("target_positive_ratio", 0),  # odds of 0, and without a bound
        ("target_positive_ratio", 1),
    ],
)
def test_ends_of_a_range_with_which_nothing_could_be_done_are_not_in_it(field, value):
    assert not rows(PruningFields)[field].takes.holds(value)


CROSS = "min_survival must be at most pruning.max_survival, got {min_survival} and {max_survival}"
FORBID = (
    "keep_ratio must lie between pruning.min_survival and pruning.max_survival, got {keep_ratio} and bounds of "
    "{min_survival} and {max_survival}"
)


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        ({"min_survival": 0.6, "max_survival": 0.4}, "min_survival", CROSS),
        ({"min_survival": 0.96}, "min_survival", CROSS),
        ({"max_survival": 0.04}, "max_survival", CROSS),
        ({"min_survival": 0.3, "max_survival": 0.3}, "max_survival", FORBID),
        ({"min_survival": 0.3, "max_survival": 0.3, "keep_ratio": 0.5}, "keep_ratio", FORBID),
        ({"max_survival": 0.4}, "max_survival", FORBID),
        ({"min_survival": 0.6}, "min_survival", FORBID),
        ({"keep_ratio": 0.97}, "keep_ratio", FORBID),
        ({"keep_ratio": 0.01, "rule": "paper"}, "keep_ratio", FORBID),
    ],
)
def test_bounds_that_leave_no_verdict_are_refused_by_the_field_that_was_given(given, field, said):
    names = {field: f"pruning.{field}" for field in rows(PruningFields)}
    with pytest.raises(PlanError) as error:
        make_pruning_plan({"detection_length": 8, **given}, names)
    plan = {"keep_ratio": 0.5, "min_survival": 0.05, "max_survival": 0.95, **given}
    assert error.value.field == f"pruning.{field}"
    assert f"pruning.{said.format(**plan)}" in str(error.value)


def test_pruning_without_anything_to_spare_is_refused_with_both_remedies():
    with pytest.raises(PlanError, match="nothing could ever be pruned") as error:
        make_plan(4, parts=pruned_by(PruningPlan(8)), max_candidates=8, names={"allow_fewer": "pruning.allow_fewer"})
    assert error.value.field == "pruning.allow_fewer"
    assert "(redundancy)" in str(error.value)
    assert "pruning.allow_fewer to true" in str(error.value)


@pytest.mark.parametrize(
    ("redundancy", "pruning"),
    [
        (1, PruningPlan(8)),
        (0, PruningPlan(8, allow_fewer=True)),
        (0, PruningPlan(8, mode="shadow")),
        (0, PruningPlan(8, keep_ratio=1)),
    ],
)
@pytest.mark.parametrize("selection", ["first", "dual_end"])
def test_pruning_that_can_prune_or_only_looks_is_allowed(redundancy, pruning, selection):
    assert make_plan(4, redundancy, selection=selection, parts=pruned_by(pruning), max_candidates=8).pruning == pruning

"""update_lengths and group_moments in C++ and torch against float64, and what they refuse."""

from types import SimpleNamespace

import pytest
import torch
from lengths_cases import assert_moments, assert_updated, random_case, special_cases
from torch import library

from vllm_rollout.tracker import reference
from vllm_rollout.tracker.ops import (
    active_implementation,
    group_moments,
    update_group_lengths,
    update_lengths,
)

OPERATORS = ("update_lengths", "group_moments", "update_group_lengths")


@pytest.fixture(params=["c++", "torch"])
def lengths(request) -> SimpleNamespace:
    """The three operators of one implementation."""
    if request.param == "torch":
        return SimpleNamespace(**{name: getattr(reference, f"{name}_reference") for name in OPERATORS})
    implementations = {name: active_implementation("cpu", name) for name in OPERATORS}
    for implementation in implementations.values():
        if implementation.name != "c++":
            pytest.skip(implementation.reason)
    return SimpleNamespace(**{name: implementation.compute for name, implementation in implementations.items()})


def all_cases():
    shapes = [(1, 4, 2), (40, 40, 3), (200, 256, 17)]
    return {
        f"{rows} rows, {capacity}, {groups}": random_case(rows, capacity, groups) for rows, capacity, groups in shapes
    }


def test_three_values_give_the_statistics_computed_by_hand(lengths):
    counts, means, m2s = (torch.zeros(3) for _ in range(3))
    slots = torch.tensor([2, -1])
    running = [
        lengths.update_lengths(slots, torch.tensor([value, 9.0]), counts, means, m2s) for value in (1.0, 2.0, 6.0)
    ]
    assert [values[0].item() for values in running] == [1.0, 1.5, 3.0]
    assert all(values[1].isnan() for values in running)
    assert (counts.tolist(), means.tolist(), m2s.tolist()) == ([0, 0, 3], [0, 0, 3], [0, 0, 14])


def test_moments_are_those_computed_by_hand(lengths):
    counts = torch.tensor([4.0, 7.0, 10.0, 2.0, 99.0, 5.0])
    groups = torch.tensor([0, 0, 0, 1, -1, 0])
    finished = torch.tensor([False, True, False, True, True, False])
    moments = lengths.group_moments(counts, groups, finished, 3)
    assert moments.live.tolist() == [[3, pytest.approx(19 / 3), pytest.approx(62 / 3)], [0, 0, 0], [0, 0, 0]]
    assert moments.finished.tolist() == [[1, 7, 0], [1, 2, 0], [0, 0, 0]]


@pytest.mark.parametrize("name", all_cases() | special_cases())
def test_update_agrees_with_float64(lengths, name):
    case = (all_cases() | special_cases())[name]
    after = case.clone()
    running_means = lengths.update_lengths(case.slots, case.values, *after.for_update[2:])
    assert_updated(running_means, after.for_update[2:], case)


@pytest.mark.parametrize("name", all_cases() | special_cases())
def test_moments_agree_with_float64(lengths, name):
    case = (all_cases() | special_cases())[name]
    assert_moments(lengths.group_moments(*case.for_moments), case)


@pytest.mark.parametrize("name", all_cases() | special_cases())
def test_both_in_one_call_are_the_update_and_then_the_moments(lengths, name):
    case = (all_cases() | special_cases())[name]
    together, apart = case.clone(), case.clone()
    actual = lengths.update_group_lengths(*together)
    expected = lengths.update_lengths(*apart.for_update)
    torch.testing.assert_close(actual.running_means, expected, rtol=0, atol=0, equal_nan=True)
    for values, expected in zip(actual.moments, lengths.group_moments(*apart.for_moments), strict=True):
        assert values.equal(expected)
    for values, expected in zip(together.for_update[2:], apart.for_update[2:], strict=True):
        torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


def test_statistics_of_a_long_candidate_stay_near_float64(lengths):
    num_steps, num_slots = 20_000, 8
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(num_steps, num_slots, generator=generator) * 3 + torch.linspace(2, 20, num_slots)
    counts, means, m2s = (torch.zeros(num_slots) for _ in range(3))
    slots = torch.arange(num_slots)
    for step_values in values:
        lengths.update_lengths(slots, step_values, counts, means, m2s)
    assert counts.tolist() == [num_steps] * num_slots
    torch.testing.assert_close(means.double(), values.double().mean(dim=0), rtol=1e-5, atol=0)
    true_m2s = values.double().var(dim=0, correction=0) * num_steps
    torch.testing.assert_close(m2s.double(), true_m2s, rtol=1e-4, atol=0)


def test_the_value_after_a_million_still_counts(lengths):
    counts, means, m2s = torch.tensor([1e6]), torch.tensor([8.0]), torch.tensor([9e6])
    mean = lengths.update_lengths(torch.tensor([0]), torch.tensor([20.0]), counts, means, m2s)
    assert counts.item() == 1_000_001
    assert mean.item() == pytest.approx(8 + 12 / 1_000_001, rel=1e-7)
    assert m2s.item() == pytest.approx(9e6 + 144, rel=1e-6)


def test_operators_are_well_behaved_under_torch_library(lengths, request):
    if request.node.callspec.params["lengths"] != "c++":
        pytest.skip("about the registration of the C++ operators")
    case = random_case(2, 6, 2)
    library.opcheck(torch.ops.vllm_rollout.update_lengths.default, case.clone().for_update)
    library.opcheck(torch.ops.vllm_rollout.group_moments.default, case.for_moments)
    library.opcheck(torch.ops.vllm_rollout.update_group_lengths.default, tuple(case.clone()))


def test_the_public_operators_use_the_active_implementation():
    case = random_case(6, 20, 3)
    after = case.clone()
    running_means, moments = update_group_lengths(*after)
    assert_updated(running_means, after.for_update[2:], case)
    assert_moments(moments, after)
    assert_moments(group_moments(*after.for_moments), after)
    again = case.clone()
    assert_updated(update_lengths(*again.for_update), again.for_update[2:], case)


WRONG = {
    "dtype of slots": ("slots", lambda slots: slots.int(), r"slots must be int64"),
    "shape of slots": ("slots", lambda slots: slots[None], r"slots must be int64 \[num_rows\]"),
    "slot too large": (
        "slots",
        lambda slots: torch.tensor([0, 1, 2, 5]),
        r"slots\[3\] must be -1 or in \[0, 5\), got 5",
    ),
    "slot below -1": (
        "slots",
        lambda slots: torch.tensor([0, -2, 1, 3]),
        r"slots\[1\] must be -1 or in \[0, 5\), got -2",
    ),
    "number of values": (
        "values",
        lambda values: values[:3],
        r"values must be \[num_rows\] = \[4\]|values must be \[4\]",
    ),
    "dtype of values": ("values", lambda values: values.double(), "values must be"),
    "dtype of counts": ("counts", lambda counts: counts.double(), r"counts must be"),
    "no capacity": ("counts", lambda counts: counts[:0], "counts must be float32 .*capacity >= 1"),
    "strided counts": ("counts", lambda counts: counts.repeat(2)[::2], r"counts must be contiguous, got stride"),
    "size of means": ("means", lambda means: means[:4], r"means must be .*\[5\]"),
    "strided m2s": ("m2s", lambda m2s: m2s.repeat(2)[::2], "m2s must be contiguous, got stride"),
    "dtype of groups": ("groups", lambda groups: groups.int(), "groups must be"),
    "group too large": (
        "groups",
        lambda groups: groups.clone().fill_(2),
        r"groups\[0\] must be -1 or in \[0, 2\), got 2",
    ),
    "group below -1": ("groups", lambda groups: groups - 2, r"must be -1 or in \[0, 2\), got -"),
    "dtype of finished": ("finished", lambda finished: finished.float(), "finished must be"),
    "size of finished": ("finished", lambda finished: finished[1:], r"finished must be .*\[5\]"),
    "negative number of groups": ("num_groups", lambda num_groups: -1, "num_groups must be at least 0, got -1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named_with_value_and_allowed_and_nothing_is_changed(lengths, name):
    case = random_case(4, 5, 2)
    argument, change, message = WRONG[name]
    wrong = case.clone()._replace(**{argument: change(getattr(case, argument))})
    before = wrong.clone()
    with pytest.raises(ValueError, match=message):
        lengths.update_group_lengths(*wrong)
    assert all(value.equal(expected) for value, expected in zip(wrong[:7], before[:7], strict=True))
    if argument in ("slots", "values", "counts", "means", "m2s"):
        with pytest.raises(ValueError, match=message):
            lengths.update_lengths(*wrong.for_update)
    if argument in ("counts", "groups", "finished", "num_groups"):
        with pytest.raises(ValueError, match=message):
            lengths.group_moments(*wrong.for_moments)


@pytest.mark.parametrize("name", WRONG)
def test_operator_called_directly_refuses_wrong_arguments_too(lengths, name, request):
    if request.node.callspec.params["lengths"] != "c++":
        pytest.skip("the reference is always called through its checks")
    case = random_case(4, 5, 2)
    argument, change, message = WRONG[name]
    wrong = case._replace(**{argument: change(getattr(case, argument))})
    with pytest.raises(RuntimeError, match=message):
        torch.ops.vllm_rollout.update_group_lengths(*wrong)

"""update_confidence in C++ and torch against float64, and what it refuses."""

import statistics

import pytest
import torch
from torch import library

from tests.kernels.confidence_cases import Case, assert_updated, random_case, special_cases
from vllm_rollout.parts.observing.tracker.dispatch import active_implementation
from vllm_rollout.parts.observing.tracker.ops import update_confidence
from vllm_rollout.parts.observing.tracker.reference import update_confidence_reference


@pytest.fixture(params=["c++", "torch"])
def compute(request):
    """The operator of one implementation."""
    if request.param == "torch":
        return update_confidence_reference
    implementation = active_implementation("cpu", "update_confidence")
    if implementation.name != "c++":
        pytest.skip(implementation.reason)
    return implementation.compute


def all_cases():
    shapes = [(1, 4, 2), (40, 40, 3), (200, 256, 8)]
    return {f"{rows} rows, {capacity}, {kept}": random_case(rows, capacity, kept) for rows, capacity, kept in shapes}


class Candidates:
    """State of some candidates, to which values are given by position."""

    def __init__(self, compute, capacity: int = 3, num_kept: int = 4, trace_length: int = 5) -> None:
        self.compute = compute
        self.means, self.m2s = (torch.full((capacity, num_kept), torch.nan) for _ in range(2))
        self.trace = torch.full((capacity, trace_length), -1.0)

    def give(self, slot: int, position: int, value: float) -> list[float]:
        row = (torch.tensor([slot]), torch.tensor([position]), torch.tensor([value]))
        return self.compute(*row, self.means, self.m2s, self.trace)[0].tolist()


def test_three_values_give_the_statistics_computed_by_hand(compute):
    candidates = Candidates(compute)
    moments = [candidates.give(2, position, value) for position, value in enumerate((1.0, 2.0, 6.0))]
    assert [mean for mean, _ in moments] == [1.0, 1.5, 3.0]
    assert [std for _, std in moments] == pytest.approx([0.0, 0.5, (14 / 3) ** 0.5])
    assert candidates.trace[2].tolist() == [1.0, 2.0, 6.0, -1.0, -1.0]
    assert (candidates.trace[:2] == -1).all()


@pytest.mark.parametrize("num_dropped", [1, 2, 3])
def test_a_position_that_comes_again_takes_the_place_of_what_came_for_it(compute, num_dropped):
    candidates = Candidates(compute)
    values = [4.0, 9.0, 1.0, 7.0, 3.0, 8.0, 2.0, 6.0]
    for position, value in enumerate(values):
        candidates.give(1, position, value)
    first = len(values) - num_dropped
    values[first:] = [10.0 + position for position in range(num_dropped)] + [5.0]
    for position in range(first, len(values)):
        mean, std = candidates.give(1, position, values[position])
    assert (mean, std) == (pytest.approx(statistics.fmean(values)), pytest.approx(statistics.pstdev(values)))


def test_a_position_of_the_trace_that_comes_again_is_written_again(compute):
    candidates = Candidates(compute)
    for position, value in ((0, 1.0), (1, 2.0), (2, 3.0), (1, 9.0)):
        candidates.give(0, position, value)
    assert candidates.trace[0].tolist() == [1.0, 9.0, 3.0, -1.0, -1.0]


@pytest.mark.parametrize("name", all_cases() | special_cases())
def test_an_update_agrees_with_float64(compute, name):
    case = (all_cases() | special_cases())[name]
    after = case.clone()
    assert_updated(compute(*after), after[3:], case)
    for given, kept in zip(after[:3], case[:3], strict=True):
        torch.testing.assert_close(given, kept, rtol=0, atol=0, equal_nan=True)


@pytest.mark.thorough
def test_statistics_of_a_long_candidate_stay_near_float64(compute):
    num_steps, num_slots = 20_000, 8
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(num_steps, num_slots, generator=generator) * 3 + torch.linspace(2, 20, num_slots)
    means, m2s, trace = torch.zeros(num_slots, 4), torch.zeros(num_slots, 4), torch.zeros(num_slots, 0)
    slots = torch.arange(num_slots)
    for position, step_values in enumerate(values):
        moments = compute(slots, torch.full((num_slots,), position), step_values, means, m2s, trace)
    torch.testing.assert_close(moments[:, 0].double(), values.double().mean(dim=0), rtol=1e-5, atol=0)
    torch.testing.assert_close(moments[:, 1].double(), values.double().std(dim=0, correction=0), rtol=1e-4, atol=0)


def test_the_operator_is_well_behaved_under_torch_library(compute, request):
    if request.node.callspec.params["compute"] != "c++":
        pytest.skip("about the registration of the C++ operator")
    library.opcheck(torch.ops.vllm_rollout.update_confidence.default, tuple(random_case(2, 6)))


def test_the_public_operator_uses_the_active_implementation():
    case = random_case(6, 20)
    after = case.clone()
    assert_updated(update_confidence(*after), after[3:], case)


WRONG = {
    "dtype of slots": ("slots", lambda slots: slots.int(), "slots must be"),
    "shape of slots": ("slots", lambda slots: slots[None], r"slots must be \[num_rows\]"),
    "slot too large": ("slots", lambda slots: torch.tensor([0, 1, 2, 5]), r"slots\[3\] must be in \[0, 5\), got 5"),
    "slot below 0": ("slots", lambda slots: torch.tensor([0, -1, 2, 3]), r"slots\[1\] must be in \[0, 5\), got -1"),
    "strided slots": ("slots", lambda slots: slots.repeat_interleave(2)[::2], "slots must be contiguous, got stride"),
    "number of positions": ("positions", lambda positions: positions[:3], r"positions must be .*\[4\]"),
    "dtype of positions": ("positions", lambda positions: positions.int(), "positions must be"),
    "negative position": (
        "positions",
        lambda positions: positions - 10_000,
        r"positions\[0\] must be in \[0, 9007199254740992\), got -",
    ),
    "number of values": ("values", lambda values: values[:3], r"values must be .*\[4\]"),
    "dtype of values": ("values", lambda values: values.double(), "values must be"),
    "dtype of means": ("means", lambda means: means.double(), "means must be"),
    "one column of means": ("means", lambda means: means[:, :1].contiguous(), "num_kept >= 2"),
    "strided means": ("means", lambda means: means.repeat(1, 2)[:, ::2], "means must be contiguous"),
    "size of m2s": ("m2s", lambda m2s: m2s[:4], r"m2s must be \[5, 4\]"),
    "dimensions of trace": ("trace", lambda trace: trace[0], "trace must be"),
    "size of trace": ("trace", lambda trace: trace[1:], r"trace must be \[5, trace_length\]"),
}


def wrong_case(name: str) -> tuple[Case, str]:
    argument, change, message = WRONG[name]
    case = random_case(4, 5)
    return case._replace(**{argument: change(getattr(case, argument))}), message


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named_with_value_and_allowed_and_nothing_is_changed(compute, name):
    wrong, message = wrong_case(name)
    before = wrong.clone()
    with pytest.raises(ValueError, match=message):
        compute(*wrong)
    assert all(value.equal(expected) for value, expected in zip(wrong, before, strict=True))


@pytest.mark.parametrize("name", WRONG)
def test_the_operator_called_directly_refuses_wrong_arguments_too(compute, name, request):
    if request.node.callspec.params["compute"] != "c++":
        pytest.skip("the reference is always called through its checks")
    wrong, message = wrong_case(name)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.vllm_rollout.update_confidence(*wrong)

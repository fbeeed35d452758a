"""The torch reference against values computed by hand, and the C++ operator against the reference."""

import math
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import library

from tests.kernels.token_confidence_cases import (
    DTYPES,
    TOLERANCE,
    random_case,
    special_cases,
    whole,
    with_masked_entries,
)
from tests.support.waiting import WAIT_S
from vllm_rollout.parts.observing.tracker.dispatch import active_implementation
from vllm_rollout.parts.observing.tracker.ops import token_confidence
from vllm_rollout.parts.observing.tracker.reference import token_confidence_reference


@pytest.fixture
def cpp():
    implementation = active_implementation("cpu")
    if implementation.name != "c++":
        pytest.skip(implementation.reason)
    return implementation.compute


def confidence_in_float64(logits: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """The definition, entry by entry, in Python's floats."""
    values = []
    for row in logits[which].double().tolist():
        left = [z for z in row if z != -math.inf]
        if not left:
            values.append(math.nan)
            continue
        peak = max(left)
        lse = peak + math.log(math.fsum(math.exp(z - peak) for z in left))
        values.append(math.fsum(lse - z for z in left) / len(left))
    return torch.tensor(values, dtype=torch.float64)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected.float(), **TOLERANCE)


def test_reference_gives_the_values_computed_by_hand():
    # Probabilities 1/8, 2/8, 5/8; then the same with the last token masked: 1/3, 2/3.
    logits = torch.tensor([[0.0, math.log(2), math.log(5)], [0.0, math.log(2), -math.inf]])
    confidences = [math.log(8) - math.log(10) / 3, math.log(3) - math.log(2) / 2]
    torch.testing.assert_close(token_confidence_reference(*whole(logits)), torch.tensor(confidences))


@pytest.mark.parametrize("vocab_size", [1, 7, 512])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_agrees_with_float64(vocab_size, dtype):
    case = random_case(9, vocab_size, dtype)
    assert_same(token_confidence_reference(*case), confidence_in_float64(*case))
    case = with_masked_entries(case, keep_fraction=0.3)
    assert_same(token_confidence_reference(*case), confidence_in_float64(*case))


@pytest.mark.parametrize("name", special_cases(torch.float32))
def test_reference_agrees_with_float64_at_the_edges(name):
    if name in ("nan and inf", "lowest number as a mask"):
        pytest.skip("no value in the definition, or too large for float32's sum")
    case = special_cases(torch.float32)[name]
    assert_same(token_confidence_reference(*case), confidence_in_float64(*case))


@pytest.mark.parametrize("compute", ["c++", "torch"])
def test_rows_with_nan_or_inf_or_nothing_are_nan_and_leave_other_rows_alone(compute, request):
    function = request.getfixturevalue("cpp") if compute == "c++" else token_confidence_reference
    confidence = function(*special_cases(torch.float32)["nan and inf"])
    assert confidence.isnan().tolist() == [True, True, True, False]
    assert function(*whole(torch.full((2, 40), -torch.inf))).isnan().all()


@pytest.mark.parametrize(
    ("num_rows", "vocab_size"),
    [(0, 512), (1, 1), (1, 7), (1, 512), (300, 1), (300, 7), (300, 512), (5, 1023), (5, 1025), (3, 49152), (2, 151936)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cpp_agrees_with_the_reference(cpp, num_rows, vocab_size, dtype):
    case = random_case(num_rows, vocab_size, dtype)
    assert_same(cpp(*case), token_confidence_reference(*case))


@pytest.mark.parametrize("name", special_cases(torch.float32))
@pytest.mark.parametrize("dtype", DTYPES)
def test_cpp_agrees_with_the_reference_at_the_edges(cpp, name, dtype):
    case = special_cases(dtype)[name]
    assert_same(cpp(*case), token_confidence_reference(*case))


def test_cpp_reads_every_float16_value(cpp):
    every_bit_pattern = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    logits = torch.stack([torch.zeros_like(every_bit_pattern), every_bit_pattern], dim=1)
    case = whole(logits)
    assert_same(cpp(*case), token_confidence_reference(*case))


def test_cpp_is_as_accurate_as_float64_for_a_large_vocabulary(cpp):
    case = random_case(2, 151936)
    torch.testing.assert_close(cpp(*case).double(), confidence_in_float64(*case), rtol=1e-6, atol=1e-6)


def test_cpp_results_do_not_depend_on_the_number_of_threads(cpp):
    case = random_case(40, 30000, torch.bfloat16)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = cpp(*case)
        torch.set_num_threads(2)
        together = cpp(*case)
    finally:
        torch.set_num_threads(num_threads)
    assert alone.equal(together)


def test_cpp_operator_is_well_behaved_under_torch_library(cpp):
    for case in (random_case(3, 70, torch.bfloat16), random_case(0, 7)):
        library.opcheck(torch.ops.vllm_rollout.token_confidence.default, case)


BOTH = torch.arange(2)
WRONG_ARGUMENTS = {
    "dtype of logits": (torch.zeros(2, 3, dtype=torch.float64), BOTH, "float16, got"),
    "integer logits": (torch.zeros(2, 3, dtype=torch.int32), BOTH, "logits must be float"),
    "logits of one row": (torch.zeros(3), BOTH[:1], r"\[num_rows, vocab_size\].*got"),
    "empty vocabulary": (torch.zeros(2, 0), BOTH, "vocab_size"),
    "transposed logits": (torch.zeros(3, 2).T, BOTH, r"stride\(1\) == 1, got 2"),
    "dtype of rows": (torch.zeros(2, 3), BOTH.int(), "rows must be int64, got"),
    "two-dimensional rows": (torch.zeros(2, 3), BOTH[:, None], r"rows must be \[num_seen\]"),
    "rows with gaps": (torch.zeros(4, 3), torch.arange(4)[::2], "rows must be contiguous, got stride"),
    "row too large": (torch.zeros(2, 3), BOTH + 1, r"rows\[1\] must be in \[0, 2\), got 2"),
    "row below 0": (torch.zeros(2, 3), BOTH - 1, r"rows\[0\] must be in \[0, 2\), got -1"),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
@pytest.mark.parametrize("compute", ["c++", "torch"])
def test_wrong_arguments_are_named_with_value_and_allowed(name, compute, request):
    function = request.getfixturevalue("cpp") if compute == "c++" else token_confidence_reference
    *arguments, message = WRONG_ARGUMENTS[name]
    with pytest.raises(ValueError, match=message):
        function(*arguments)


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_operator_called_directly_refuses_wrong_arguments_too(cpp, name):
    *arguments, message = WRONG_ARGUMENTS[name]
    with pytest.raises(RuntimeError, match=message):
        torch.ops.vllm_rollout.token_confidence(*arguments)


def test_token_confidence_uses_the_active_implementation(cpp):
    case = random_case(4, 600)
    assert token_confidence(*case).equal(cpp(*case))


@pytest.mark.thorough
def test_importing_the_package_loads_neither_torch_nor_vllm_and_the_tracker_not_vllm():
    code = """
        import sys
        import vllm_rollout
        assert not {"torch", "vllm"} & sys.modules.keys()
        from vllm_rollout.parts.observing.tracker.dispatch import active_implementation
        active_implementation("cpu")
        assert not {"triton", "vllm"} & sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=WAIT_S)

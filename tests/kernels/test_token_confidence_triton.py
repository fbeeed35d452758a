"""The Triton kernel of token_confidence against the torch reference: interpreted, and on a GPU where there is one."""

import pytest
import torch

from tests.kernels.token_confidence_cases import DTYPES, TOLERANCE, Case, random_case, special_cases
from tests.kernels.triton_runs import interpreted_runs
from vllm_rollout.parts.observing.tracker.dispatch import active_implementation
from vllm_rollout.parts.observing.tracker.ops import token_confidence
from vllm_rollout.parts.observing.tracker.reference import token_confidence_reference

pytest.importorskip("triton")

pytestmark = pytest.mark.thorough

RANDOM_SHAPES = [(0, 512), (1, 1), (1, 7), (3, 512), (2, 16384), (3, 16385), (2, 49152)]


def all_cases() -> dict[str, Case]:
    cases = {}
    for dtype in DTYPES:
        for num_rows, vocab_size in RANDOM_SHAPES:
            cases[f"{num_rows}x{vocab_size} {dtype}"] = random_case(num_rows, vocab_size, dtype)
        cases |= {f"{name} {dtype}": case for name, case in special_cases(dtype, vocab_size=40000).items()}
    return cases


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, **TOLERANCE)


OUTSIDE: Case = (random_case(3, 512)[0], torch.tensor([1, 3, -1]))
"""Rows that do not exist, which on a GPU cannot be refused."""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory) -> dict[str, torch.Tensor]:
    """The kernel's results for every case, from Triton's interpreter."""
    cases = {name: ("token_confidence", case) for name, case in (all_cases() | {"outside": OUTSIDE}).items()}
    runs = interpreted_runs(cases, tmp_path_factory.mktemp("interpreted"))
    return {name: confidence for name, (confidence, _) in runs.items()}


@pytest.mark.parametrize("name", all_cases())
def test_interpreted_kernel_agrees_with_the_reference(interpreted, name):
    assert_same(interpreted[name], token_confidence_reference(*all_cases()[name]))


def test_a_row_that_does_not_exist_is_nan_and_leaves_others_alone(interpreted):
    logits, rows = OUTSIDE
    torch.testing.assert_close(interpreted["outside"][:1], token_confidence_reference(logits, rows[:1]))
    assert interpreted["outside"][1:].isnan().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", all_cases())
def test_kernel_on_a_gpu_agrees_with_the_reference(name):
    assert active_implementation("cuda").name == "triton"
    # Not .cuda() of the case: a copy to the device keeps no padding between rows.
    logits, rows = all_cases()[name]
    on_device = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device="cuda").copy_(logits)
    assert_same(token_confidence(on_device, rows.cuda()).cpu(), token_confidence_reference(logits, rows))

"""The Triton kernel of token_stats against the torch reference: interpreted, and on a GPU where there is one."""

import pytest
import torch
from token_stats_cases import DTYPES, TOLERANCE, Case, random_case, special_cases
from triton_runs import interpreted_runs

from vllm_rollout.tracker.ops import TokenStats, active_implementation, token_stats
from vllm_rollout.tracker.reference import token_stats_reference

pytest.importorskip("triton")

RANDOM_SHAPES = [(0, 512), (1, 1), (1, 7), (3, 512), (2, 16384), (3, 16385), (2, 49152)]


def all_cases() -> dict[str, Case]:
    cases = {}
    for dtype in DTYPES:
        for num_rows, vocab_size in RANDOM_SHAPES:
            cases[f"{num_rows}x{vocab_size} {dtype}"] = random_case(num_rows, vocab_size, dtype)
        cases |= {f"{name} {dtype}": case for name, case in special_cases(dtype, vocab_size=40000).items()}
    return cases


def assert_same_stats(actual: TokenStats, expected: TokenStats) -> None:
    for name, value, reference in zip(TokenStats._fields, actual, expected, strict=True):
        assert value.dtype == torch.float32, name
        torch.testing.assert_close(value, reference, msg=lambda text, name=name: f"{name}: {text}", **TOLERANCE)


OUTSIDE: Case = (random_case(3, 512)[0], torch.tensor([1, 3, -1]), torch.tensor([5, 5, 5]))
"""Rows that do not exist, which on a GPU cannot be refused."""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory) -> dict[str, TokenStats]:
    """The kernel's results for every case, from Triton's interpreter."""
    cases = {name: ("token_stats", case) for name, case in (all_cases() | {"outside": OUTSIDE}).items()}
    runs = interpreted_runs(cases, tmp_path_factory.mktemp("interpreted"))
    return {name: TokenStats(*stats) for name, (stats, _) in runs.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("name", all_cases())
def test_interpreted_kernel_agrees_with_the_reference(interpreted, name):
    assert_same_stats(interpreted[name], token_stats_reference(*all_cases()[name]))


def test_a_row_that_does_not_exist_is_nan_and_leaves_others_alone(interpreted):
    logits, rows, sampled = OUTSIDE
    for values, expected in zip(
        interpreted["outside"], token_stats_reference(logits, rows[:1], sampled[:1]), strict=True
    ):
        torch.testing.assert_close(values[:1], expected)
        assert values[1:].isnan().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", all_cases())
def test_kernel_on_a_gpu_agrees_with_the_reference(name):
    assert active_implementation("cuda").name == "triton"
    # Not .cuda() of the case: a copy to the device keeps no padding between rows.
    logits, rows, sampled = all_cases()[name]
    on_device = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device="cuda").copy_(logits)
    actual = token_stats(on_device, rows.cuda(), sampled.cuda())
    assert_same_stats(TokenStats(*(values.cpu() for values in actual)), token_stats_reference(logits, rows, sampled))

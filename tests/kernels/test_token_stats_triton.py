"""The Triton kernel against the torch reference: interpreted, compiled for sm_90, and on a GPU where there is one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from token_stats_cases import DTYPES, TOLERANCE, Case, random_case, special_cases

from vllm_rollout.tracker.ops import TokenStats, active_implementation, token_stats, token_stats_reference

pytest.importorskip("triton")

HERE = Path(__file__).parent
RANDOM_SHAPES = [(0, 512), (1, 1), (1, 7), (3, 512), (2, 16384), (3, 16385), (2, 49152)]


def all_cases() -> dict[str, Case]:
    cases = {}
    for dtype in DTYPES:
        for num_rows, vocab_size in RANDOM_SHAPES:
            cases[f"{num_rows}x{vocab_size} {dtype}"] = random_case(num_rows, vocab_size, dtype)
        cases |= {f"{name} {dtype}": case for name, case in special_cases(dtype, vocab_size=40000).items()}
    return cases


def run_script(name: str, *arguments: Path, cache: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    subprocess.run([sys.executable, HERE / name, *arguments], check=True, env=environment, timeout=120)


def assert_same_stats(actual: TokenStats, expected: TokenStats) -> None:
    for name, value, reference in zip(TokenStats._fields, actual, expected, strict=True):
        assert value.dtype == torch.float32, name
        torch.testing.assert_close(value, reference, msg=lambda text, name=name: f"{name}: {text}", **TOLERANCE)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory) -> dict[str, TokenStats]:
    """The kernel's results for every case, from Triton's interpreter."""
    folder = tmp_path_factory.mktemp("interpreted")
    torch.save(all_cases(), folder / "cases.pt")
    run_script("triton_interpreter.py", folder / "cases.pt", folder / "results.pt", cache=folder)
    return {name: TokenStats(*stats) for name, stats in torch.load(folder / "results.pt").items()}


@pytest.mark.parametrize("name", all_cases())
def test_interpreted_kernel_agrees_with_the_reference(interpreted, name):
    assert_same_stats(interpreted[name], token_stats_reference(*all_cases()[name]))


def test_every_kernel_compiles_for_sm_90(tmp_path):
    run_script("triton_compiler.py", tmp_path / "results.json", cache=tmp_path / "cache")
    results = json.loads((tmp_path / "results.json").read_text())
    assert {f"token_stats.token_stats_kernel[{dtype}]" for dtype in ("fp32", "bf16", "fp16")} <= results.keys()
    for name, result in results.items():
        assert "sm_90" in result["target"], name
        assert result["cubin_bytes"] > 0, name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", all_cases())
def test_kernel_on_a_gpu_agrees_with_the_reference(name):
    assert active_implementation("cuda").name == "triton"
    # Not .cuda() of the case: a copy to the device keeps no padding between rows.
    logits, sampled = all_cases()[name]
    on_device = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device="cuda").copy_(logits)
    actual = token_stats(on_device, sampled.cuda())
    assert_same_stats(TokenStats(*(values.cpu() for values in actual)), token_stats_reference(logits, sampled))

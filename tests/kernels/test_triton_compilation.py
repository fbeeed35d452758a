"""Every Triton kernel compiles for the GPUs it is meant for, without one, into the machine code that was looked at."""

import json

import pytest

from benchmarks.roofline import INSTRUCTIONS_PER_ENTRY
from tests.kernels.triton_runs import run_script

pytest.importorskip("triton")

from vllm_rollout.kernels import token_confidence

MOST_SHARED_BYTES = 227 * 1024
"""Upper bound of a program's shared memory on sm_90."""
MOST_REGISTERS = {
    "token_confidence": 104,  # two programs of 8 warps fit a multiprocessor up to 128
    "quality_head, 16 rows": 104,
    "quality_head, 64 rows": 224,
    "update_confidence": 40,
}
MOST_SPILLED_BYTES = {"token_confidence.token_confidence_kernel[fp32] on sm_90a": 8}
"""Upper bounds of spilled bytes. All other programs spill none."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    run_script("triton_compiler", folder / "results.json", cache=folder / "cache")
    return json.loads((folder / "results.json").read_text())


@pytest.mark.thorough
def test_every_kernel_compiles_for_hopper_and_blackwell(results):
    kernels = {name.partition("[")[0] for name in results}
    assert kernels == {
        "token_confidence.token_confidence_kernel",
        "quality_head.quality_head_kernel",
        "confidence.update_confidence_kernel",
    }
    for target in ("sm_90a", "sm_100a"):
        for dtype in ("fp32", "bf16", "fp16"):
            assert f"token_confidence.token_confidence_kernel[{dtype}] on {target}" in results
    for name, result in results.items():
        assert result["shared_bytes"] <= MOST_SHARED_BYTES, name


@pytest.mark.thorough
def test_no_kernel_takes_more_registers_or_spills(results):
    for name, result in results.items():
        kind = next(kind for kind in MOST_REGISTERS if all(part in name for part in kind.split(", ")))
        assert result["registers"] <= MOST_REGISTERS[kind], name
        assert result["spilled_bytes"] <= MOST_SPILLED_BYTES.get(name, 0), name


@pytest.mark.thorough
def test_large_inputs_are_read_16_bytes_at_a_time(results):
    """Single entries: the last block of an odd vocabulary, rows and counters."""
    for name, result in results.items():
        if "update_confidence" not in name:
            wide, all_loads = result["loads"]["128"], sum(result["loads"].values())
            assert wide >= 0.6 * all_loads, (name, result["loads"])


@pytest.mark.thorough
def test_the_loop_over_the_vocabulary_has_as_many_instructions_as_the_roofline_assumes(results):
    entries_of_a_thread = token_confidence.NUM_BLOCKS * token_confidence.BLOCK_SIZE / (32 * token_confidence.NUM_WARPS)
    for dtype, short in (("float32", "fp32"), ("bfloat16", "bf16")):
        result = results[f"token_confidence.token_confidence_kernel[{short}] on sm_90a"]
        assert result["largest_loop"] / entries_of_a_thread == pytest.approx(INSTRUCTIONS_PER_ENTRY[dtype], rel=0.05)


@pytest.mark.thorough
def test_parts_of_a_score_are_written_before_the_arrival_and_read_after_it(results):
    """All stores of a program, a barrier, a fence, the atomic; then a barrier, and only then loads of others' parts."""
    for name, result in results.items():
        if "quality_head" not in name:
            continue
        order = [operation.split(".")[0] for operation in result["order"]]
        (atomic,) = [position for position, operation in enumerate(order) if operation == "ATOMG"]
        before, after = order[:atomic], order[atomic + 1 :]
        last_store = len(before) - 1 - before[::-1].index("STG")
        assert "LDG" not in before[last_store:], name
        barrier = before.index("BAR", last_store)
        assert "MEMBAR" in before[barrier:], name
        assert "BAR" in after[: after.index("LDG")], name

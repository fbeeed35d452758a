"""Every Triton kernel compiles for the GPU it is meant for, without one."""

import json

import pytest
from triton_runs import run_script

pytest.importorskip("triton")

MOST_SHARED_BYTES = 227 * 1024
"""What one program may have on sm_90."""


@pytest.mark.thorough
def test_every_kernel_compiles_for_sm_90(tmp_path):
    run_script("triton_compiler.py", tmp_path / "results.json", cache=tmp_path / "cache")
    results = json.loads((tmp_path / "results.json").read_text())
    kernels = {name.partition("[")[0] for name in results}
    assert kernels == {
        "token_confidence.token_confidence_kernel",
        "quality_head.quality_head_kernel",
        "confidence.update_confidence_kernel",
    }
    assert {
        f"token_confidence.token_confidence_kernel[{dtype}]" for dtype in ("fp32", "bf16", "fp16")
    } <= results.keys()
    for name, result in results.items():
        assert "sm_90" in result["target"], name
        assert result["cubin_bytes"] > 0, name
        assert result["shared_bytes"] <= MOST_SHARED_BYTES, name

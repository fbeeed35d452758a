"""No step compiles a kernel: all were compiled while warming up, in every variant."""

import json

import pytest

from tests.kernels.triton_runs import run_script

pytest.importorskip("triton")


@pytest.mark.thorough
def test_a_step_compiles_nothing_after_the_warm_up_whatever_its_size(tmp_path):
    run_script("triton_variants", tmp_path / "results.json", cache=tmp_path / "cache")
    results = json.loads((tmp_path / "results.json").read_text())
    compiled = [name for result in results.values() for name in result["warm_up"]]
    assert set(compiled) == {"token_confidence_kernel", "update_confidence_kernel", "quality_head_kernel"}
    assert [result["steps"] for result in results.values()] == [[]] * len(results)

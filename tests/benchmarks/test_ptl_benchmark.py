"""Rows of the benchmark of predicted times, made from an answer without a server."""

import pytest

from benchmarks.ptl import Workload, row_of, summarise
from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve

COST = CostModel(((0, PTLCurve((1,), (1.0,))), (100, PTLCurve((1,), (2.0,)))), prefill_s_per_token=0.1)
ANSWER = {
    "groups": [
        {
            "prompt_token_ids": [5] * 40,
            "trajectories": [{"num_tokens": 2}, {"num_tokens": 1}],
            "candidates": [{"num_tokens": 1, "state": "finished"}],
        }
    ]
}


def test_a_row_predicts_from_the_lengths_and_the_prompts_that_were_computed():
    row = row_of(Workload(1, 3, 8), 10.0, ANSWER, COST, block_size=32)
    # Two steps at contexts of 40 and 41; siblings compute 8 tokens each beyond the shared block.
    assert row["predicted_s"] == pytest.approx(1.40 + 1.41 + 0.1 * (40 + 8 + 8))
    assert row["error"] == pytest.approx(row["predicted_s"] / 10 - 1, abs=1e-4)
    assert row["eq4_as_printed_s"] == pytest.approx(2.0)
    assert row["lengths"] == [2, 1, 1]


def test_the_summary_is_of_absolute_errors():
    rows = [{"error": error, "eq4_as_printed_error": 2 * error} for error in (-0.2, 0.01, 0.05)]
    summary = summarise(rows)
    assert summary["error"] == {"median": 0.05, "largest": 0.2}
    assert summary["eq4_as_printed_error"] == {"median": 0.1, "largest": 0.4}
    assert summary["target_met"]

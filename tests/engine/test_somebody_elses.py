"""VLLM_ROLLOUT: a script that builds vLLM's own LLM, and knows nothing of us, has races."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import run_script
from tests.support.reference import worst

pytestmark = pytest.mark.versions

ASKED = {"VLLM_ROLLOUT": "scheduler,worker", "VLLM_ROLLOUT_REDUNDANCY": "3", "VLLM_ROLLOUT_GROUP_SIZE": "4"}


def numbers(answer: dict[str, Any]) -> list[tuple[int, int]]:
    """For each row: the first token of its prompt, and its number of completions."""
    return [(row[0], len(row) - 1) for row in answer["rows"]]


def test_requests_with_n_and_equal_prompts_in_a_row_are_raced_and_come_back_as_they_were_asked_for(tiny_model: str):
    result = run_script("somebody_elses.py", "llm", tiny_model, **ASKED)
    assert result["module"] == "vllm_rollout.parts.in_process.api.llm"
    assert result["max_num_seqs"] == 16 + 4 * 3
    assert (numbers(result["with_n"]), result["with_n"]["num_ended"]) == ([(5, 4), (6, 4)], 14)
    assert numbers(result["in_a_row"]) == [(5, 1)] * 4 + [(6, 1)] * 4
    assert result["in_a_row"]["num_ended"] == 14
    assert numbers(result["cut"]) == [(5, 1)] * 3 + [(6, 1)] * 4
    assert result["cut"]["num_ended"] == 3 + 7, "a part of a group is no race"
    assert (numbers(result["single"]), result["single"]["num_ended"]) == ([(5, 1), (6, 1)], 2)
    assert (numbers(result["greedy"]), result["greedy"]["num_ended"]) == ([(5, 1), (6, 1)] * 2, 4)
    assert result["beams"] == [2, 2]


@pytest.mark.thorough
def test_an_async_engine_that_was_imported_before_is_ours_too(tiny_model: str):
    result = run_script("somebody_elses.py", "async", tiny_model, **ASKED)
    assert result["module"] == "vllm_rollout.parts.in_process.api.async_llm"
    assert numbers(result) == [(5, 4)]


def test_an_engine_that_sleeps_and_loses_its_memory_races_as_before(tiny_model: str):
    """At level 2 vLLM gives weights and KV cache away; both are new afterwards, and nothing of ours is lost."""
    result = run_script("somebody_elses.py", "sleeping", tiny_model, **ASKED)
    assert result["module"] == "vllm_rollout.parts.in_process.api.llm"
    assert len(result["rows"]) == 3 * 4
    for row in result["rows"]:
        assert worst(tiny_model, row["prompt"], row) < 1e-4

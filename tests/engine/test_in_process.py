"""`vllm_rollout.LLM` and `vllm_rollout.AsyncLLM`: rollouts in a trainer's own process, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import run_script

pytestmark = pytest.mark.versions


@pytest.fixture(scope="module")
def llm(tiny_model: str) -> dict[str, Any]:
    """With the engine core in a process of its own; tests/parts/in_process/test_interrupts.py has one here."""
    return run_script("in_process.py", "llm", tiny_model, own_session=True)


@pytest.fixture(scope="module", params=["llm", pytest.param("async", marks=pytest.mark.thorough)])
def result(request: pytest.FixtureRequest, tiny_model: str) -> dict[str, Any]:
    if request.param == "llm":
        return request.getfixturevalue("llm")
    return run_script("in_process.py", "async", tiny_model)


def test_a_rollout_answers_as_the_endpoint_does(result: dict[str, Any]) -> None:
    answer = result["answer"]
    assert [group["prompt_id"] for group in answer["groups"]] == ["0", "1", "chat"]
    for group in answer["groups"]:
        assert group["status"] == "complete"
        assert len(group["trajectories"]) == 4
        assert len(group["candidates"]) == 2
    usage = answer["usage"]
    assert usage["num_candidates"] == 18
    assert usage["generated_tokens"] == usage["returned_tokens"] + usage["wasted_tokens"]


def test_the_same_seed_gives_the_same_tokens(result: dict[str, Any]) -> None:
    def tokens(answer: dict[str, Any]) -> list[list[list[int]]]:
        return [[t["token_ids"] for t in group["trajectories"]] for group in answer["groups"]]

    assert tokens(result["answer"]) == tokens(result["again"])


def test_rewards_teach(result: dict[str, Any]) -> None:
    assert result["rewards"]["accepted"] == 12
    answer = result["answer"]["groups"]
    assert result["report"] == sum(t["index"] % 2 for group in answer for t in group["trajectories"])
    assert result["state"] > 0


def test_a_function_of_the_trainers_grades(result: dict[str, Any]) -> None:
    (group,) = result["graded"]["groups"]
    assert [t["reward"] for t in group["trajectories"]] == [2 * len(t["text"]) for t in group["trajectories"]]


def test_a_stream_is_an_iterator_of_events(result: dict[str, Any]) -> None:
    events = result["events"]
    assert events[-1] == "done"
    assert events.count("group") == 2
    assert events.count("trajectory") == 4
    assert "tokens" in events


def test_generate_with_fields_returns_exactly_n_and_without_them_what_vllm_does(result: dict[str, Any]) -> None:
    assert [number for number, _ in result["generated"]] == [3, 3]
    assert all(length >= 6 for _, lengths in result["generated"] for length in lengths)
    assert result["after"] == [3, 3]
    assert result["plain"] == [2, 2]
    assert result.get("enqueued", [3, 3]) == [3, 3]


def test_a_stream_that_is_closed_leaves_the_engine_to_others(llm: dict[str, Any]) -> None:
    assert llm["closed"] == ["RuntimeError: a stream of this LLM is open. Read it to its end, or close it.", 2]
    assert llm["meanwhile"] == 4


def test_rewards_name_the_outputs_of_generate(result: dict[str, Any]) -> None:
    assert result["named"]["accepted"] == 6


def test_prompts_that_are_generated_together_are_audited_together(result: dict[str, Any]) -> None:
    audited = result["audited"]
    assert 12 < sum(audited) < 84, "half of 8 calls with 12 answers each; by the seeds, always as many"
    if "closed" in result:  # one call for all prompts; the async LLM gets each by itself
        assert all(each == pytest.approx(12, abs=0.1) or each == pytest.approx(0, abs=0.1) for each in audited)


def test_errors_say_what_and_leave_the_engine_as_it_was(result: dict[str, Any]) -> None:
    first, second, third, *enqueued = result["errors"]
    assert first.startswith("RolloutError: ")
    assert "group_size: should be greater than or equal to 1" in first
    assert second.startswith("RolloutError: ")
    assert "group_size + redundancy must be at most" in second
    assert third.startswith(
        "VLLMValidationError: extra_args.rollout_redundancy: n + rollout_redundancy must be at most"
    )
    for error in enqueued:
        assert error == "RuntimeError: requests are enqueued in this LLM. Call wait_for_completion first."


def test_ctrl_c_in_a_terminal_ends_what_runs_and_neither_the_engine_nor_the_next_rollout(llm: dict[str, Any]) -> None:
    """It reaches the engine core's process too. tests/parts/in_process/test_interrupts.py has it at every moment."""
    assert llm["interrupted"] == [["KeyboardInterrupt", ["complete"] * 2, 8]] * 4
    assert llm["left"] == 0

"""Groups in vLLM's own LLM, by one engine argument: no server, no plugin, in its own and in another process."""

from __future__ import annotations

import pytest

from tests.engine.conftest import run_script

pytestmark = pytest.mark.versions


@pytest.fixture(scope="module", params=["0", "1"], ids=["in this process", "core in its own process"])
def result(request: pytest.FixtureRequest, tiny_model: str) -> dict[str, list]:
    return run_script("plain_llm.py", tiny_model, VLLM_ENABLE_V1_MULTIPROCESSING=request.param)


def test_groups_of_single_requests_race(result: dict[str, list]) -> None:
    by_prompt = result["by_prompt"]
    for group in (result["joined"][:4], result["joined"][4:], result["scored"], by_prompt[:4], by_prompt[4:]):
        ((first,), (second,), (third,), (fourth,)) = group
        assert [first[:2], second[:2]] == [[6, "stop"], [9, "stop"]]
        for tokens, finish_reason, stop_reason in (third, fourth):
            assert (finish_reason, stop_reason) == ("abort", "surplus")
            assert tokens <= 11, "stopped in the step of the second end, or the one already scheduled"


def test_a_plain_request_is_vllms(result: dict[str, list]) -> None:
    (((tokens, finish_reason, _),),) = result["plain"]
    assert (tokens, finish_reason) == (12, "stop")


def test_a_field_that_needs_our_client_is_refused_in_words(result: dict[str, list]) -> None:
    ((tokens, finish_reason, said),) = result["refused"][0]
    assert (tokens, finish_reason) == (0, "error")
    assert said.startswith("rollout_redundancy needs rollout_group_size")


def test_the_n_of_one_request_are_a_group(result: dict[str, list]) -> None:
    reasons = [finish_reason for _, finish_reason, _ in result["n"][0]]
    assert sorted(reasons) == ["abort", "abort", "stop", "stop"]

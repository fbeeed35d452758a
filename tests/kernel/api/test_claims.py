"""A part may answer a request of vLLM's endpoints. The others go on to the engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.kernel.api.stepped_llm import SteppedLLM
from tests.kernel.core.scheduler_runs import TracedRun
from vllm_rollout.kernel.api.claims import AskedRequest
from vllm_rollout.kernel.wire import TAG_KEY

pytestmark = pytest.mark.anyio


class Answers:
    """Answers requests with this field."""

    def __init__(self, field: str) -> None:
        self.field = field
        self.asked: list[AskedRequest] = []

    def claim(self, asked: AskedRequest) -> AsyncGenerator[Any, None] | None:
        self.asked.append(asked)
        return self.answer(asked) if self.field in asked.fields else None

    async def answer(self, asked: AskedRequest) -> AsyncGenerator[Any, None]:
        yield self.field, asked.id


@pytest.fixture
def llm(new_run: Callable[..., TracedRun]) -> SteppedLLM:
    return SteppedLLM(new_run())


async def test_the_first_part_that_claims_a_request_answers_it(llm: SteppedLLM) -> None:
    parts = [Answers("rollout_sugar"), Answers("rollout_salt"), Answers("rollout_salt")]
    llm.claims = [part.claim for part in parts]
    params = SamplingParams(extra_args={"rollout_salt": 3, "of_others": 4})
    outputs = llm.generate({"length": 2}, params, "a", priority=7)
    assert [each async for each in outputs] == [("rollout_salt", "a")]
    assert [len(part.asked) for part in parts] == [1, 1, 0]
    asked = parts[1].asked[0]
    assert asked == ({"length": 2}, params, "a", {"rollout_salt": 3}, {"priority": 7})
    assert not llm.added  # nothing reaches the engine


async def test_what_no_part_claims_goes_on(llm: SteppedLLM) -> None:
    llm.claims = [(part := Answers("rollout_salt")).claim]
    for params in (SamplingParams(), SamplingParams(extra_args={"of_others": 4})):
        with pytest.raises(VLLMValidationError, match="rollout_pepper"):
            llm.generate({"length": 2}, SamplingParams(extra_args={"rollout_pepper": 1}), "b")
        plain = llm.generate({"length": 2}, params, "c")
        assert plain.__qualname__ == "AsyncLLM.generate"
        await plain.aclose()
    assert [asked.fields for asked in part.asked] == [{"rollout_pepper": 1}, {}] * 2


async def test_no_part_hears_of_a_request_that_every_part_would_have_to_refuse(llm: SteppedLLM) -> None:
    llm.claims = [(part := Answers("rollout_salt")).claim]
    with pytest.raises(VLLMValidationError, match="is set by the server"):
        llm.generate({"length": 2}, SamplingParams(extra_args={"rollout_salt": 1, TAG_KEY: "x"}), "d")
    assert not part.asked

"""With which seeds candidates reach vLLM: a prompt's of their own behind our endpoints, vLLM's behind its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.kernel.api.stepped_llm import SteppedEngine, SteppedLLM, let_everybody_run
from vllm_rollout.kernel.http.engine import GroupOrder, PreparedPrompt
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.prompt_key import seed_for

pytestmark = pytest.mark.anyio


def seeds(llm: SteppedLLM) -> list[int | None]:
    return [params.seed for _, params in llm.asked.values()]


@pytest.mark.parametrize(("seed", "first"), [(7, seed_for(7, "q1")), (None, None)])
async def test_a_prompt_of_a_rollout_has_a_seed_of_its_own_and_its_candidates_those_that_follow(new_run, seed, first):
    llm = SteppedLLM(new_run())
    params = SamplingParams(seed=seed, max_tokens=9, detokenize=False)
    prompt = PreparedPrompt("p", [5] * 20, ([3, 4], params, None))
    events = SteppedEngine(llm).run_group(GroupOrder("g", GroupPlan(2), prompt, "q1", priority=-3))
    group = asyncio.create_task(_all(events))
    await let_everybody_run()
    await llm.step_to_the_end()
    assert len(await group) == 2
    assert seeds(llm) == ([None, None] if first is None else [first, first + 1])
    assert params.seed == seed, "of other prompts too"
    assert list(llm.priorities.values()) == [-3, -3], "of the rollout, for vLLM's own queue"


async def test_the_n_choices_of_an_openai_request_have_the_seeds_of_vllm(new_run):
    llm = SteppedLLM(new_run())
    kind = RequestOutputKind.FINAL_ONLY
    params = SamplingParams(n=2, seed=7, detokenize=False, output_kind=kind, extra_args={"rollout_redundancy": 1})
    answer = asyncio.create_task(_all(llm.generate([3, 4, 5], params, "r")))
    await let_everybody_run()
    await llm.step_to_the_end()
    await answer
    assert seeds(llm) == [7, 8, 9]


async def _all(events: Any) -> list[Any]:
    return [event async for event in events]

"""Candidates that go on: what vLLM is asked for, and what it cannot do."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config

from tests.kernel.api.stepped_llm import SteppedLLM, let_everybody_run
from tests.parts.pruning.steps import pruned_by, said
from vllm_rollout.kernel.api.continued import (
    READS_OUTPUT_TOKENS,
    prompt_text,
    resume_refusal,
    resumed_params,
    resumed_prompt,
    text_of,
)
from vllm_rollout.kernel.http.engine import Beginnings
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan
from vllm_rollout.parts.pruning.rules.step import SCORING

pytestmark = pytest.mark.anyio

PROMPT = {"type": "token", "prompt_token_ids": [5, 6]}


def test_output_tokens_stand_behind_the_prompt():
    assert resumed_prompt(PROMPT, [7, 8])["prompt_token_ids"] == [5, 6, 7, 8]
    assert resumed_prompt(PROMPT, ())["prompt_token_ids"] == [5, 6]
    assert PROMPT["prompt_token_ids"] == [5, 6]


@pytest.mark.parametrize(("num_before", "limits"), [(0, (20, 10)), (4, (16, 6)), (15, (5, 0))])
def test_limits_are_those_that_are_left(num_before, limits):
    params = SamplingParams(max_tokens=20, min_tokens=10, seed=3, temperature=0.5)
    left = resumed_params(params, num_before)
    assert (left.max_tokens, left.min_tokens, left.seed, left.temperature) == (*limits, 3, 0.5)
    assert (params.max_tokens, params.min_tokens) == (20, 10)


REFUSED: dict[str, Any] = {
    "presence_penalty": 0.1,
    "frequency_penalty": -0.1,
    "structured_outputs": StructuredOutputsParams(regex="a"),
    "stop": ["x"],
    "bad_words": ["x"],
    "thinking_token_budget": 4,
    "extra_args": {"x": 1},
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_looks_at_output_tokens_is_refused(field):
    refusal = resume_refusal(SamplingParams(**{field: REFUSED[field]}), PROMPT)
    assert refusal.param == "resume"
    assert f"sampling_params.{field}" in str(refusal)


def test_every_reason_is_tried_but_for_one_that_needs_a_type_of_vllm_s():
    assert READS_OUTPUT_TOKENS.keys() - REFUSED.keys() == {"repetition_detection"}


def test_what_counts_prompt_and_answer_alike_goes_on():
    params = SamplingParams(repetition_penalty=1.2, seed=4, min_tokens=2, stop_token_ids=[3], logit_bias={4: 1.0})
    assert resume_refusal(params, PROMPT) is None


def test_prompts_of_more_than_tokens_are_refused():
    assert "'multimodal'" in str(resume_refusal(SamplingParams(), {"type": "multimodal"}))


async def test_candidates_begin_where_they_stood_and_a_lost_one_is_made_up_for_by_a_new_one(new_run):
    llm = SteppedLLM(new_run())
    plan = GroupPlan(2, 0, num_replaceable=2, parts=pruned_by(PruningPlan(40, mode="shadow")))
    beginnings = Beginnings({1: [7, 8, 9], 2: ()}, next_index=4, survival={1: 0.25})
    params = SamplingParams(max_tokens=50, min_tokens=4, seed=100, output_kind=RequestOutputKind.FINAL_ONLY)
    prompt = {**PROMPT, "length": 20}
    indices, scoring = [], Scoring("r", "q", 7)

    async def run() -> None:
        async for candidate in llm.run_candidates("g", plan, prompt, params, said=said(scoring), beginnings=beginnings):
            indices.append((candidate.index, candidate.note.state))

    running = asyncio.create_task(run())
    await let_everybody_run()
    for _ in range(5):
        await llm.step()
    await llm.abort("g-c1")
    await llm.step_to_the_end()
    await running
    assert indices == [(1, "failed"), (2, "finished"), (4, "finished")]
    seen = {id: (asked["prompt_token_ids"], p.max_tokens, p.min_tokens, p.seed) for id, (asked, p) in llm.asked.items()}
    assert seen == {
        "g-c1": ([5, 6, 7, 8, 9], 47, 1, 101),
        "g-c2": ([5, 6], 50, 4, 102),
        "g-c4": ([5, 6], 50, 4, 104),
    }
    assert {id: tag.num_resumed for id, (tag, _) in llm.added.items()} == {"g-c1": 3, "g-c2": 0, "g-c4": 0}
    resumed = replace(scoring, num_resumed=3, survival_before=0.25)
    its = {id: SCORING.of(tag.said) for id, (tag, _) in llm.added.items()}
    assert its == {"g-c1": resumed, "g-c2": scoring, "g-c4": scoring}


@pytest.mark.parametrize("stopped", [False, True])
def test_text_is_that_of_all_tokens_at_once(tiny_model, stopped):
    """Also where the joint parts a letter of several bytes."""
    config = EngineArgs(model=tiny_model).create_model_config()
    tokenizer = cached_tokenizer_from_config(config)
    token_ids = tokenizer.encode("hello wörld, 日本")
    said = text_of(config, [5, 6, 7], SamplingParams(), [*token_ids, 9] if stopped else token_ids, stopped=stopped)
    assert said == "hello wörld, 日本"


def test_the_text_of_a_prompt_goes_on_behind_what_would_stop_an_answer(tiny_model):
    config = EngineArgs(model=tiny_model).create_model_config()
    asked = "Question: 1 + 1?\nAnswer: it is\n"
    token_ids = cached_tokenizer_from_config(config).encode(asked)
    assert prompt_text(config, token_ids, SamplingParams(stop=["\n"])) == asked

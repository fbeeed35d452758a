"""What is made of vLLM's outputs where a request was stopped before it said anything."""

import pytest
from vllm import SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from vllm_rollout.adapter.api.client.outputs import pad_prompt_logprobs
from vllm_rollout.adapter.api.client.session_turns import ended_at_once

PROMPT = {"type": "token", "prompt_token_ids": [5, 6, 7]}


def output_of(prompt_logprobs):
    choice = CompletionOutput(0, "", [], None, None, finish_reason="abort")
    return RequestOutput("r", None, PROMPT["prompt_token_ids"], prompt_logprobs, [choice], finished=True)


@pytest.mark.parametrize(
    ("given", "padded"),
    [
        ([None], [None, None, None]),
        ([None, {6: 1}, {7: 1}], [None, {6: 1}, {7: 1}]),
        ([], []),
        (None, None),
    ],
    ids=["stopped before its prompt was computed", "whole", "a later delta", "not asked for"],
)
def test_each_token_of_a_prompt_has_a_place_among_its_log_probabilities(given, padded):
    output = output_of(given)
    pad_prompt_logprobs(output)
    assert output.prompt_logprobs == padded


@pytest.mark.anyio
@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize(
    ("asked", "logprobs", "prompt_logprobs"),
    [
        ({}, None, None),
        ({"logprobs": 0}, [], None),
        ({"logprob_token_ids": [1, 2]}, [], None),
        ({"logprobs": 2, "prompt_logprobs": 2}, [], [None] * 3),
        ({"prompt_logprobs": 0}, None, [None] * 3),
    ],
)
async def test_a_turn_of_a_session_that_has_ended_has_the_form_that_was_asked_for(
    kind, asked, logprobs, prompt_logprobs
):
    params = SamplingParams(output_kind=kind, **asked)
    (output,) = [each async for each in ended_at_once("r", PROMPT, params)]
    (choice,) = output.outputs
    assert (output.finished, output.prompt_token_ids, choice.finish_reason) == (True, [5, 6, 7], "abort")
    assert (choice.logprobs, output.prompt_logprobs) == (logprobs, prompt_logprobs)

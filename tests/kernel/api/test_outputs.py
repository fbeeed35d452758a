"""Outputs of requests that were stopped before their first token."""

import pytest
from vllm.outputs import CompletionOutput, RequestOutput

from vllm_rollout.kernel.api.candidates import pad_prompt_logprobs

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

"""Outputs of turns: those of a session that has ended, and those that vLLM answers with an error."""

import math
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from tests.kernel.api.test_outputs import PROMPT
from vllm_rollout.parts.sessions.api.turns import ended_at_once, heard, options_of


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


@pytest.mark.parametrize(("asked", "priority"), [({}, 3), ({"priority": 0}, 3), ({"priority": -1}, -1)])
def test_a_turn_has_its_groups_priority_unless_its_client_names_one(asked, priority):
    turn = SimpleNamespace(group=SimpleNamespace(priority=lambda: 3))
    assert options_of({**asked, "lora_request": None}, turn) == {"priority": priority, "lora_request": None}


class Calls:
    """A session service as far as turns end: what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def leave(self, turn: object) -> None:
        self.told.append("has not happened")

    def end(self, turn: object, *args: object, **kwargs: object) -> None:
        self.told.append("has ended")


@pytest.mark.anyio
@pytest.mark.parametrize("in_deltas", [False, True])
@pytest.mark.parametrize(
    ("logprobs", "told"),
    [([-1.0, -2.0], "has ended"), ([-1.0, math.nan], "has not happened"), ([math.nan, -2.0], "has not happened")],
)
async def test_a_turn_that_vllm_answers_with_an_error_because_of_its_logprobs_has_not_happened(
    in_deltas, logprobs, told
):
    async def outputs():
        for at in range(1, 3):
            since = at - 1 if in_deltas else 0
            tokens, values = [5, 6][since:at], logprobs[since:at]
            told = [{token: Logprob(value)} for token, value in zip(tokens, values, strict=True)]
            choice = CompletionOutput(0, "", tokens, None, told, finish_reason="length" if at == 2 else None)
            yield RequestOutput("r", None, [5], None, [choice], finished=at == 2), None

    service, group = Calls(), SimpleNamespace(saw_bad_weights=False)
    turn = SimpleNamespace(group=group)
    assert len([each async for each in heard(service, turn, outputs(), in_deltas=in_deltas)]) == 2
    assert (service.told, group.saw_bad_weights) == ([told], told == "has not happened")

"""Turns of sessions whose prompt leaves no token for an answer."""

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError

from vllm_rollout.parts.sessions.api.turns import refuse_full_turns

MESSAGES = [{"role": "user", "content": "hi"}]
REQUESTS = [
    (CompletionRequest, {"prompt": "hi"}),
    (ChatCompletionRequest, {"messages": MESSAGES}),
    (ChatCompletionRequest, {"messages": MESSAGES, "stream": True}),
]


@pytest.fixture(autouse=True)
def full_turns_are_refused(monkeypatch):
    for request_class in (CompletionRequest, ChatCompletionRequest):
        monkeypatch.setattr(request_class, "to_sampling_params", request_class.to_sampling_params)
    refuse_full_turns(None)


@pytest.mark.parametrize(("request_class", "body"), REQUESTS)
def test_a_turn_whose_prompt_fills_the_context_is_told_so_and_other_requests_get_vllms_words(request_class, body):
    turn = request_class(**body, vllm_xargs={"rollout_session": "a"})
    with pytest.raises(VLLMValidationError, match=r"^messages: this turn's prompt fills the context"):
        turn.to_sampling_params(0, {})
    assert turn.to_sampling_params(5, {}).max_tokens == 5
    with pytest.raises(VLLMValidationError, match="at least 1, got 0"):
        request_class(**body).to_sampling_params(0, {})
    with pytest.raises(VLLMValidationError, match="at least 1, got 0"):
        request_class(**body, max_tokens=0, vllm_xargs={"rollout_session": "a"}).to_sampling_params(0, {})

"""Each endpoint refuses requests that this engine cannot run, before anything is launched."""

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError

from vllm_rollout.kernel.api.refusals import (
    refuse_our_fields_in_beam_search,
    refuse_unwritable,
)

MESSAGES = [{"role": "user", "content": "hi"}]
REQUESTS = [
    (CompletionRequest, {"prompt": "hi"}),
    (ChatCompletionRequest, {"messages": MESSAGES}),
    (ChatCompletionRequest, {"messages": MESSAGES, "stream": True}),
]


@pytest.fixture(autouse=True)
def beam_search_refuses(monkeypatch):
    for request_class in (CompletionRequest, ChatCompletionRequest):
        monkeypatch.setattr(request_class, "to_beam_search_params", request_class.to_beam_search_params)
    refuse_our_fields_in_beam_search()
    refuse_our_fields_in_beam_search()  # once per app, of which a process may make several


@pytest.mark.parametrize(("request_class", "body"), REQUESTS)
def test_beam_search_refuses_our_fields(request_class, body):
    request = request_class(**body, use_beam_search=True, vllm_xargs={"top": 1, "rollout_redundancy": 4})
    with pytest.raises(
        VLLMValidationError, match=r"^vllm_xargs\.rollout_redundancy: does not work with use_beam_search"
    ):
        request.to_beam_search_params(8, {})


@pytest.mark.parametrize("xargs", [None, {}, {"top": 1}])
@pytest.mark.parametrize(("request_class", "body"), REQUESTS)
def test_beam_search_without_our_fields_is_vllms(request_class, body, xargs):
    params = request_class(**body, n=3, use_beam_search=True, vllm_xargs=xargs).to_beam_search_params(8, {})
    assert (params.beam_width, params.max_tokens) == (3, 8)


@pytest.mark.parametrize("extra_args", [{"\ud800": 1}, {"rollout_group_id": "\udfff"}, {"a": ["b", "\ud800"]}])
def test_half_a_surrogate_pair_is_refused_before_a_message_is_made_of_it(extra_args) -> None:
    with pytest.raises(VLLMValidationError, match=r"vllm_xargs: .* unpaired surrogate, '\\u"):
        refuse_unwritable(extra_args)
    refuse_unwritable({"a": "\N{CAT}", "b": [1, 2.5, object()]})
    refuse_unwritable(None)

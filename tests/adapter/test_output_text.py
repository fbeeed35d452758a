"""A prompt that ends inside a UTF-8 character is not in the text of its answers, nor are its stop strings found."""

from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor

from vllm_rollout.adapter.output_text import detokenizer_of, keep_to_output_text
from vllm_rollout.kernel.api.continued import text_of
from vllm_rollout.kernel.core.stop_strings import StopStrings
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.wire import CandidateTag
from vllm_rollout.parts.rewards.api.graded_answers import REWARD, without_reward

ANSWER = " fine, 日本 x"


@pytest.fixture(scope="module")
def config(tiny_model):
    return EngineArgs(model=tiny_model).create_model_config()


@pytest.fixture(scope="module")
def tokenizer(config):
    return cached_tokenizer_from_config(config)


@pytest.fixture(scope="module")
def cut_prompt(tokenizer) -> list[int]:
    token_ids = tokenizer.encode("The END is \\boxed{42} 日")
    assert tokenizer.decode(token_ids[:-1]).endswith("\ufffd")
    return token_ids[:-1]


TOKENS = st.lists(st.integers(3, 258), max_size=12)


@given(prompt=TOKENS, answer=TOKENS)
@example(prompt=[67, 161, 227, 108, 175, 256, 249, 225, 130], answer=[70])
@example(prompt=[130] * 40, answer=[131, 70])
def test_the_text_is_that_of_the_output_tokens_whatever_the_prompt_ends_with(tokenizer, prompt, answer):
    answer = [*answer, *tokenizer.encode("x")]
    detokenizer = detokenizer_of(tokenizer, "r", prompt, SamplingParams())
    detokenizer.update(answer, stop_terminated=False)
    assert detokenizer.output_text == tokenizer.decode(answer, skip_special_tokens=True)
    assert detokenizer.output_token_ids == answer


def test_without_prompt_tokens_there_is_a_text(tokenizer):
    detokenizer = detokenizer_of(tokenizer, "r", None, SamplingParams())
    detokenizer.update(tokenizer.encode(ANSWER), stop_terminated=False)
    assert detokenizer.output_text == ANSWER


def test_the_scheduler_finds_stop_strings_in_the_answer_only(config, tokenizer, cut_prompt):
    params = SamplingParams(stop=["END", "日"])
    request = SimpleNamespace(request_id="r", prompt_token_ids=cut_prompt, sampling_params=params)
    answer = tokenizer.encode(ANSWER)
    found = StopStrings(config, request).found_at(answer)
    assert tokenizer.decode(answer[:found]).endswith("日")


def test_a_text_that_is_made_later_begins_with_the_answer(config, tokenizer, cut_prompt):
    params = SamplingParams(stop=["END"])
    assert text_of(config, cut_prompt, params, tokenizer.encode(ANSWER), stopped=False) == ANSWER


TAG = CandidateTag("g", 0, GroupTerms(1, 1, early_stop=True), 1).to_extra_args()
GRADED = without_reward(SamplingParams(extra_args={REWARD: "math"})).extra_args


@pytest.mark.parametrize("extra_args", [TAG, GRADED], ids=["candidate", "graded"])
@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA])
def test_the_api_process_sends_the_text_of_the_answer(tokenizer, cut_prompt, extra_args, kind):
    processor = OutputProcessor(tokenizer, log_stats=False)
    keep_to_output_text(processor)
    params = SamplingParams(stop=["END"], output_kind=kind, extra_args=extra_args)
    request = EngineCoreRequest("r", cut_prompt, None, params, None, 0.0, None, None, None, external_req_id="r")
    processor.add_request(request, None)
    answer = tokenizer.encode(ANSWER)
    outputs = []
    for token in answer:
        finish_reason = FinishReason.LENGTH if token is answer[-1] else None
        message = EngineCoreOutput("r", [token], finish_reason=finish_reason)
        outputs += processor.process_outputs([message]).request_outputs
    assert "".join(output.outputs[0].text for output in outputs) == ANSWER
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert outputs[-1].prompt_token_ids == cut_prompt, "the prompt itself is whole"

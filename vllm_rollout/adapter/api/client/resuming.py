"""Candidates that go on from tokens of an earlier round: they are a longer prompt to vLLM.

Invariant: what vLLM reads of output tokens only, and so would not see of the earlier ones, is refused beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config

from vllm_rollout.adapter.output_text import detokenizer_of
from vllm_rollout.server.engine import RequestError

READS_OUTPUT_TOKENS = {
    "presence_penalty": "counts tokens of the answer",
    "frequency_penalty": "counts tokens of the answer",
    "structured_outputs": "follows a grammar from the first token of the answer",
    "stop": "may be found across the joint; stop_token_ids may not",
    "bad_words": "may be found across the joint; logit_bias may not",
    "repetition_detection": "looks for patterns in the answer",
    "thinking_token_budget": "counts tokens of the answer",
    "extra_args": "may be read by a logits processor that looks at the answer",
}
"""Sampling fields with which a candidate cannot go on, each with its reason. `repetition_penalty` counts prompt and
answer alike, `min_tokens` and `max_tokens` are reduced."""


def resume_refusal(params: SamplingParams, prompt: Mapping[str, Any]) -> RequestError | None:
    """Why candidates of this prompt cannot go on later; None when they can."""
    for field, reason in READS_OUTPUT_TOKENS.items():
        if getattr(params, field):
            return RequestError(
                f"resume: does not go together with sampling_params.{field}, which {reason}, and a candidate that goes "
                "on begins a new one. Leave one of them out.",
                param="resume",
            )
    if prompt["type"] != "token":
        return RequestError(
            f"resume: needs prompts of tokens only, got one of type {prompt['type']!r}. Make a run without resume.",
            param="resume",
        )
    return None


def resumed_prompt(prompt: Any, token_ids: Sequence[int]) -> Any:
    """The prompt with output tokens behind it."""
    if not token_ids:
        return prompt
    return {**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], *token_ids]}


def resumed_params(params: SamplingParams, num_before: int) -> SamplingParams:
    """What is left after so many tokens. With a seed, its chance begins anew: another one than without the break."""
    left = copy(params)
    if num_before:
        left.max_tokens = params.max_tokens - num_before
        left.min_tokens = max(0, params.min_tokens - num_before)
    return left


def text_of(
    model_config: ModelConfig,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    token_ids: Sequence[int],
    *,
    stopped: bool,
) -> str:
    """The text of output tokens as vLLM would have made it; `stopped`: a stop token is the last one."""
    detokenizer = detokenizer_of(cached_tokenizer_from_config(model_config), "text", prompt_token_ids, params)
    detokenizer.update(list(token_ids), stop_terminated=stopped)
    return detokenizer.get_next_output_text(finished=True, delta=False)


def prompt_text(model_config: ModelConfig, token_ids: Sequence[int], params: SamplingParams) -> str:
    """The text of a prompt, in which a stop string ends nothing."""
    endless = copy(params)
    endless.stop = []
    return text_of(model_config, token_ids, endless, token_ids, stopped=False)


def whole_text(model_config: ModelConfig, token_ids: Sequence[int]) -> str:
    """The text of tokens, special ones included."""
    return cached_tokenizer_from_config(model_config).decode(list(token_ids), skip_special_tokens=False)

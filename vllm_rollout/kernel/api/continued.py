"""Candidates that continue from tokens of an earlier round: for vLLM they have a longer prompt.

Invariant: sampling fields by which vLLM reads only output tokens are refused, because it would miss the earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config

from vllm_rollout.adapter.output_text import detokenizer_of
from vllm_rollout.kernel.http.engine import RequestError

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
"""Sampling fields with which a candidate cannot continue, each with its reason. `repetition_penalty` counts prompt and
answer alike. `min_tokens` and `max_tokens` are reduced.
"""


def resume_refusal(params: SamplingParams, prompt: Mapping[str, Any]) -> RequestError | None:
    """Error if candidates of this prompt cannot continue later, else None."""
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
    """The prompt followed by output tokens."""
    if not token_ids:
        return prompt
    return {**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], *token_ids]}


def resumed_params(params: SamplingParams, num_before: int) -> SamplingParams:
    """Parameters for the rest after `num_before` output tokens. With a seed, sampling starts anew and differs from an
    uninterrupted candidate.
    """
    left = copy(params)
    if num_before:
        left.max_tokens = params.max_tokens - num_before  # type: ignore[operator]
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
    """Text of output tokens, as vLLM makes it. `stopped`: True if the last token is a stop token."""
    detokenizer = detokenizer_of(cached_tokenizer_from_config(model_config), "text", prompt_token_ids, params)
    detokenizer.update(list(token_ids), stop_terminated=stopped)
    return detokenizer.get_next_output_text(finished=True, delta=False)


def prompt_text(model_config: ModelConfig, token_ids: Sequence[int], params: SamplingParams) -> str:
    """Text of a prompt. Stop strings in it are ignored."""
    endless = copy(params)
    endless.stop = []
    return text_of(model_config, token_ids, endless, token_ids, stopped=False)

"""Text of output tokens, as vLLM's own incremental detokenizers make it.

Invariant: the text contains nothing of the prompt. If a prompt ends inside a UTF-8 character, vLLM's detokenizer for
fast tokenizers repeats the whole prompt, and finds stop strings there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor

from vllm_rollout.kernel.wire import TAG_KEY

MARK_KEY = "vllm_rollout_output_text"
"""Key in `extra_args` of a request that is no candidate, but whose text is graded."""
NUM_BEFORE = 8
"""Prompt tokens that a detokenizer gets. It uses them only for the space before the first word."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Replacement character. A detokenizer waits after it, because the bytes may be the beginning of a character."""


@dataclass(frozen=True, slots=True)
class _Detokenized:
    """Fields of a request that vLLM's detokenizers read."""

    request_id: str
    prompt_token_ids: Sequence[int] | None
    sampling_params: SamplingParams
    prompt_embeds: None = None


def detokenizer_of(
    tokenizer: TokenizerLike, request_id: str, prompt_token_ids: Sequence[int] | None, params: SamplingParams
) -> IncrementalDetokenizer:
    """A detokenizer for output tokens after this prompt."""
    before = None if prompt_token_ids is None else _read_before(tokenizer, prompt_token_ids, params.skip_special_tokens)
    request = _Detokenized(request_id, before, params)
    return IncrementalDetokenizer.from_new_request(tokenizer, request)  # type: ignore[arg-type]


def _read_before(tokenizer: TokenizerLike, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """Last tokens of the prompt whose text ends with a whole character. Empty if that is too far from the
    prompt's end.
    """
    num_tokens = len(prompt_token_ids)
    for end in range(num_tokens, max(0, num_tokens - NUM_BEFORE), -1):
        before = list(prompt_token_ids[max(0, end - NUM_BEFORE) : end])
        if not tokenizer.decode(before, skip_special_tokens=skip_special_tokens).endswith(INCOMPLETE):
            return before
    return []


class OutputTextOnly:
    """Mixin of vLLM's OutputProcessor for candidates and graded requests. Overrides: add_request."""

    tokenizer: TokenizerLike | None
    request_states: dict[str, Any]

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super().add_request(request, *args, **kwargs)  # type: ignore[misc]
        params = request.sampling_params
        if self.tokenizer is None or params is None or not params.detokenize:
            return
        extra_args = params.extra_args or {}
        if TAG_KEY in extra_args or MARK_KEY in extra_args:
            state = self.request_states[request.request_id]
            state.detokenizer = detokenizer_of(self.tokenizer, request.request_id, request.prompt_token_ids, params)


def keep_to_output_text(processor: OutputProcessor) -> None:
    """Add our mixin to an output processor. Its class changes, because vLLM constructs it inline."""
    cls = type(processor)
    processor.__class__ = type(f"Rollout{cls.__name__}", (OutputTextOnly, cls), {})

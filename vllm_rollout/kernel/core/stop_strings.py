"""Detection of stop strings in the scheduler, where the group is decided.

vLLM looks for stop strings in the API process and then aborts the request. A group would take that abort for a lost
candidate, and one step too late. So a candidate with stop strings is detokenized in the scheduler as well, by vLLM's
own incremental detokenizer.
"""

from __future__ import annotations

from vllm.config import ModelConfig
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.request import Request

from vllm_rollout.adapter.output_text import detokenizer_of


class StopStrings:
    """Looks for one candidate's stop strings in its output. The tokenizer is loaded for the first such candidate."""

    __slots__ = ("_detokenizer",)

    def __init__(self, model_config: ModelConfig, request: Request) -> None:
        tokenizer = cached_tokenizer_from_config(model_config)
        self._detokenizer = detokenizer_of(
            tokenizer,
            request.request_id,
            request.prompt_token_ids,
            request.sampling_params,  # type: ignore[arg-type]
        )

    def found_at(self, new_token_ids: list[int]) -> int | None:
        """Number of new tokens up to the one that completes a stop string. None if no stop string is complete."""
        for num_kept, token_id in enumerate(new_token_ids, start=1):
            if self._detokenizer.update([token_id], stop_terminated=False) is not None:
                return num_kept
        return None

"""Stop strings seen where the group is decided.

vLLM looks for stop strings in the API process and then aborts the request. A group would take that abort for a lost
candidate, and one step too late; so a candidate with stop strings is detokenized in the scheduler as well, by vLLM's
own incremental detokenizer.
"""

from __future__ import annotations

from vllm.config import ModelConfig
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.request import Request


class StopStrings:
    """Watches one candidate's output for its stop strings."""

    __slots__ = ("_detokenizer",)

    def __init__(self, detokenizer: IncrementalDetokenizer) -> None:
        self._detokenizer = detokenizer

    def found_in(self, new_token_ids: list[int]) -> bool:
        return self._detokenizer.update(new_token_ids, stop_terminated=False) is not None


class StopStringsFactory:
    """Loads the tokenizer when the first candidate with stop strings arrives."""

    def __init__(self, model_config: ModelConfig) -> None:
        self._model_config = model_config

    def watch(self, request: Request) -> StopStrings:
        tokenizer = cached_tokenizer_from_config(self._model_config)
        # The detokenizer reads `sampling_params`, `prompt_token_ids` and `request_id`, which a Request has as well.
        return StopStrings(IncrementalDetokenizer.from_new_request(tokenizer, request))  # type: ignore[arg-type]

"""Requests that this engine cannot run, each with a reason and a remedy.

Invariant: a request refused on one endpoint is refused on all of them, before anything is launched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import wraps
from http import HTTPStatus
from typing import Any, NoReturn

from vllm.config import VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.platforms import current_platform
from vllm.sampling_params import BeamSearchParams

from vllm_rollout.adapter.options import observing_refusal
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.xargs import rollout_xargs

NO_PROMPT_LOGPROBS = (
    "prompt_logprobs (echo with logprobs): with --enable-lora on a CPU they would end the engine. Leave them out, or "
    "start the server without --enable-lora."
)


def refuses_prompt_logprobs(vllm_config: VllmConfig) -> bool:
    """True if prompt log probabilities would end the engine. vLLM's LoRA operators for CPUs treat every row as a
    sampled one.
    """
    return vllm_config.lora_config is not None and current_platform.is_cpu()


def refuse_unwritable(extra_args: Mapping[str, Any]) -> None:
    """Raises: VLLMValidationError (400) for an unpaired surrogate. JSON allows it, messages to the engine do not."""
    try:
        json.dumps(extra_args, ensure_ascii=False, default=repr).encode()
    except UnicodeEncodeError as error:
        found = ascii(error.object[error.start : error.end])
        raise VLLMValidationError(
            f"vllm_xargs: names and values must be valid Unicode text, got an unpaired surrogate, {found}. Drop it.",
            parameter="vllm_xargs",
        ) from error


def raise_as_vllms(error: RequestError) -> NoReturn:
    """Raise the error of vLLM that its endpoints answer with this status."""
    if error.status == HTTPStatus.BAD_REQUEST:
        raise VLLMValidationError(str(error), parameter=error.param) from error
    raise GracefulHTTPError(str(error), HTTPStatus(error.status)) from error


def pruning_refusal(vllm_config: VllmConfig) -> str | None:
    """Reason if candidates cannot be scored and pruned here, else None."""
    reason = observing_refusal(vllm_config)
    if reason is None:
        return None
    return (
        f"pruning does not work on this server: {reason}, so that candidates cannot be scored. Start the server "
        "without it, or leave pruning out."
    )


def refuse_our_fields_in_beam_search() -> None:
    """Make vLLM's requests refuse `rollout_*` fields together with `use_beam_search`. Call this once per API process.

    Beam search reaches the engine client as many requests of one token, without the request's fields. Both are visible
    only where a request becomes beam search parameters, and vLLM has no hook there.
    """
    for request_class in (ChatCompletionRequest, CompletionRequest):
        if not hasattr(request_class.to_beam_search_params, "__wrapped__"):
            refusing = _refusing(request_class.to_beam_search_params)
            request_class.to_beam_search_params = refusing  # type: ignore[method-assign]


def _refusing(to_beam_search_params: Callable[..., BeamSearchParams]) -> Callable[..., BeamSearchParams]:
    @wraps(to_beam_search_params)
    def refuse_or_pass(
        request: ChatCompletionRequest | CompletionRequest, *args: Any, **kwargs: Any
    ) -> BeamSearchParams:
        if xargs := rollout_xargs(request.vllm_xargs or {}):
            field = f"vllm_xargs.{next(iter(xargs))}"
            raise VLLMValidationError(
                f"{field}: does not work with use_beam_search, whose beams are no candidates of a group. Leave out "
                "use_beam_search, or the rollout_* fields.",
                parameter=field,
            )
        return to_beam_search_params(request, *args, **kwargs)

    return refuse_or_pass

"""A rollout's sampling parameters, as vLLM's SamplingParams.

Invariant: a field that the installed vLLM lacks, or that the server sets, is refused by name.
"""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_rollout.adapter.compat import SCALE_OUT_FLAG, has, vllm_version
from vllm_rollout.kernel.http.engine import RequestError

SEEDS = range(-(2**63), 2**63)
"""Range of seeds that vLLM's own endpoints take."""

GENERATE = "/inference/v1/generate" + (" of a server with --enable-scale-out" if has(SCALE_OUT_FLAG) else "")
ELSEWHERE = f"is not returned by this endpoint: use {GENERATE}"

OURS = {
    "n": "is not a sampling field here: use group_size",
    "output_kind": "is set by the server: use stream and stream_tokens",
    "stream_interval": "is set by the server: use stream_tokens",
    "detokenize": 'is set by the server: use "text" in include',
    "flat_logprobs": "is set by the server",
    "skip_clone": "is set by the server",
    "output_text_buffer_length": "is set by the server",
    "prompt_logprobs": ELSEWHERE,
    "prompt_logprob_start": ELSEWHERE,
    "prompt_logprob_token_ids": ELSEWHERE,
    "logprob_token_ids": ELSEWHERE,
}
"""SamplingParams fields that a rollout refuses, with the replacement."""

FIELDS = {field.name for field in msgspec.structs.fields(SamplingParams)}
ALLOWED = sorted(field for field in FIELDS - OURS.keys() if not field.startswith("_"))
SAMPLING = TypeAdapter(SamplingParams)


def sampling_params(
    sampling: dict[str, Any], defaults: dict[str, Any], *, want_logprobs: bool, want_text: bool
) -> SamplingParams:
    """SamplingParams from the fields of a request on top of the model's defaults.

    Raises: RequestError that names the field. For an unknown field it also has the version of vLLM and the allowed
    fields.
    """
    for field in sampling:
        if field in OURS and field in FIELDS:
            raise _refused(field, f"{OURS[field]}.")
        if field not in ALLOWED:
            allowed = ", ".join(ALLOWED)
            raise _refused(field, f"vLLM {vllm_version} has no such sampling field; allowed: {allowed}.")
        if field == "extra_args" and sampling[field] is not None:
            if not isinstance(sampling[field], dict):
                raise _refused(field, f"must be an object, got {sampling[field]!r:.80}.")
            ours = [key for key in sampling[field] if key.startswith(("rollout_", "vllm_rollout"))]
            if ours:
                raise _refused(f"{field}.{ours[0]}", "is not allowed here; use the fields of the request itself.")
    seed = sampling.get("seed")
    if isinstance(seed, int) and seed not in SEEDS:
        raise _refused("seed", f"must be an integer from {SEEDS.start} to {SEEDS.stop - 1}, got {seed}.")
    defaults = {key: value for key, value in defaults.items() if key in ALLOWED}
    if logprobs := sampling.get("logprobs"):
        problem = f"only the sampled token's is returned here, got {logprobs!r:.80}"
        raise _refused("logprobs", f"{problem}. Leave it out, or use {GENERATE} for those of other tokens.")
    try:
        params: SamplingParams = SAMPLING.validate_python({**defaults, "max_tokens": None, **sampling})
    except ValidationError as error:
        raise _sampling_error(error) from error
    except (VLLMClientError, ValueError, TypeError, OverflowError) as error:
        raise RequestError(f"sampling_params: {error}", param=sampling_field(error)) from error
    params.detokenize = want_text or bool(params.stop)
    params.flat_logprobs = True
    if want_logprobs and params.logprobs is None:
        params.logprobs = 0
    return params


def _refused(field: str, problem: str) -> RequestError:
    return RequestError(f"sampling_params.{field}: {problem}", param=f"sampling_params.{field}")


def sampling_field(error: Exception) -> str:
    """Name of the field that vLLM's own check refused, if it names one."""
    field = error.parameter if isinstance(error, VLLMValidationError) else None
    return f"sampling_params.{field}" if field in ALLOWED else "sampling_params"


def _sampling_error(error: ValidationError) -> RequestError:
    """RequestError from pydantic's error. Pydantic tries SamplingParams as an instance and as a dictionary. The message
    is about the latter.
    """
    problems = error.errors(include_url=False)
    problem = next((p for p in problems if p["type"] != "is_instance_of"), problems[0])
    field = ".".join(["sampling_params", *(part for part in problem["loc"] if part in ALLOWED)])
    message = problem["msg"].removeprefix("Value error, ")
    return RequestError(f"{field}: {message}, got {problem['input']!r:.80}", param=field)

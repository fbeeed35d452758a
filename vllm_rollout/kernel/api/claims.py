"""Requests of vLLM's own endpoints that a part answers, instead of the kernel.

Invariant: the first part that claims a request answers it. The kernel has checked its `extra_args` for all parts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, NamedTuple

from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams


class AskedRequest(NamedTuple):
    """A request as vLLM's endpoint passes it to `generate`."""

    prompt: Any
    params: SamplingParams
    id: str
    fields: Mapping[str, Any]
    """Its `rollout_*` fields."""
    options: Mapping[str, Any]
    """The other arguments of `generate`."""


Claim = Callable[[AskedRequest], AsyncGenerator[RequestOutput, None] | None]
"""Returns the outputs if the part answers this request, else None. Raises: vLLM's error for a bad request."""

"""Arguments of requests that an emulated device reads, in the processes that they enter."""

from __future__ import annotations

from typing import Any

from vllm_rollout.adapter.arguments import Check
from vllm_rollout.parts.emulation.fate import forced_length
from vllm_rollout.parts.emulation.options import EmulationOptions


def argument_check(vllm_config: Any) -> Check | None:
    """Face `arguments`: a worker has no client to answer, so forced lengths are checked before."""
    return None if EmulationOptions.of(vllm_config).file is None else forced_length

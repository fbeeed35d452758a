"""Group rollouts for reinforcement learning that stop inside stock vLLM's step loop."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_rollout.kernel.client.client import (
        AgentGroup,
        AgentRound,
        AgentSession,
        AsyncRolloutClient,
        AsyncRun,
        Pruning,
        QualityHead,
        RolloutClient,
        RolloutError,
        Run,
        SessionLost,
        Void,
    )
    from vllm_rollout.kernel.core.scheduler import make_scheduler as Scheduler
    from vllm_rollout.kernel.worker.worker import RolloutWorker as Worker
    from vllm_rollout.parts.drafts.worker.drafts import Drafts
    from vllm_rollout.parts.in_process.api.async_llm import AsyncLLM
    from vllm_rollout.parts.in_process.api.llm import LLM
    from vllm_rollout.parts.in_process.api.teaching import teach

_CLIENT = "vllm_rollout.kernel.client.client"
_PLACES = {
    "AgentGroup": (_CLIENT, "AgentGroup"),
    "AgentRound": (_CLIENT, "AgentRound"),
    "AgentSession": (_CLIENT, "AgentSession"),
    "AsyncRolloutClient": (_CLIENT, "AsyncRolloutClient"),
    "AsyncRun": (_CLIENT, "AsyncRun"),
    "Pruning": (_CLIENT, "Pruning"),
    "QualityHead": (_CLIENT, "QualityHead"),
    "RolloutClient": (_CLIENT, "RolloutClient"),
    "RolloutError": (_CLIENT, "RolloutError"),
    "Run": (_CLIENT, "Run"),
    "SessionLost": (_CLIENT, "SessionLost"),
    "Void": (_CLIENT, "Void"),
    "AsyncLLM": ("vllm_rollout.parts.in_process.api.async_llm", "AsyncLLM"),
    "LLM": ("vllm_rollout.parts.in_process.api.llm", "LLM"),
    "teach": ("vllm_rollout.parts.in_process.api.teaching", "teach"),
    "Drafts": ("vllm_rollout.parts.drafts.worker.drafts", "Drafts"),
    "Scheduler": ("vllm_rollout.kernel.core.scheduler", "make_scheduler"),
    "Worker": ("vllm_rollout.kernel.worker.worker", "RolloutWorker"),
}
"""Module of each public name, and its name in that module."""

__all__ = [
    "LLM",
    "AgentGroup",
    "AgentRound",
    "AgentSession",
    "AsyncLLM",
    "AsyncRolloutClient",
    "AsyncRun",
    "Drafts",
    "Pruning",
    "QualityHead",
    "RolloutClient",
    "RolloutError",
    "Run",
    "Scheduler",
    "SessionLost",
    "Void",
    "Worker",
    "__version__",
    "teach",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Lazy: vLLM imports this package in every process, and each needs one of these at most.
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, there = _PLACES[name]
    return getattr(import_module(module), there)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Group rollouts for reinforcement learning that stop inside stock vLLM's step loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_rollout.client.client import (
        AsyncRolloutClient,
        AsyncRun,
        Pruning,
        QualityHead,
        RolloutClient,
        RolloutError,
        Run,
    )

__all__ = [
    "AsyncRolloutClient",
    "AsyncRun",
    "Pruning",
    "QualityHead",
    "RolloutClient",
    "RolloutError",
    "Run",
    "__version__",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Lazy: vLLM imports this package in every process, and only trainers need the client.
    if name in __all__:
        from vllm_rollout.client import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

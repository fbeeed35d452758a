"""Group rollouts for reinforcement learning that stop inside stock vLLM's step loop."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

_PLACES = {
    "AsyncRolloutClient": "vllm_rollout.client:AsyncRolloutClient",
    "GroupOptions": "vllm_rollout.kernel.client.body:GroupOptions",
    "RolloutClient": "vllm_rollout.client:RolloutClient",
    "RolloutError": "vllm_rollout.kernel.client.connection:RolloutError",
    "RolloutOptions": "vllm_rollout.kernel.client.body:RolloutOptions",
    "Scheduler": "vllm_rollout.kernel.core.scheduler:make_scheduler",
    "Worker": "vllm_rollout.kernel.worker.worker:RolloutWorker",
}
"""Places of the names that no part offers. Parts offer others. `__init__.pyi` has the types of all."""

__version__ = "0.1.0"


def _places() -> dict[str, str]:
    from vllm_rollout.kernel.parts import exports

    return {**_PLACES, **exports()}


def __getattr__(name: str) -> Any:
    # Lazy: vLLM imports this package in every process, and each needs one of these at most.
    from vllm_rollout.kernel.parts import load

    # `from vllm_rollout import models` asks here first, also for a list of parts that cannot be.
    places = {} if find_spec(f"{__name__}.{name}") is not None else _places()
    if name == "__all__":
        return sorted([*places, "__version__"])
    if name not in places:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load(places[name])


def __dir__() -> list[str]:
    return sorted({*globals(), "__all__", *_places()})

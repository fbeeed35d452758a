"""Group rollouts for reinforcement learning that stop inside stock vLLM's step loop."""

from __future__ import annotations

from typing import Any

_PLACES = {
    "AsyncRolloutClient": "vllm_rollout.client:AsyncRolloutClient",
    "GivenWeights": "vllm_rollout.kernel.client.weights:GivenWeights",
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

    try:
        places = _places()
    except ValueError as error:  # of the list of parts: importing a module asks for its name here first
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {error}") from error
    if name == "__all__":
        return sorted([*places, "__version__"])
    if name not in places:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load(places[name])


def __dir__() -> list[str]:
    return sorted({*globals(), "__all__", *_places()})

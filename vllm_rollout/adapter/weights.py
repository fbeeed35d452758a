"""Detection of new weights where they arrive: in a model's `load_weights`, and in a worker's calls that bring weights.

The worker counts changes. Each step's report has the count by which the step was computed. So a token's version is that
of the step which sampled it, for every step loop and every kind of pause. The engine core asks for the count after each
call of a trainer, before it schedules the next step.

Invariant: a process counts for itself. If the worker is in the engine core's process, both read the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing, get_layerwise_info
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCore

from vllm_rollout.adapter.compat import WEIGHT_SPANS, has
from vllm_rollout.adapter.names import learned_name
from vllm_rollout.kernel.rules.types import BASE_MODEL

OWN_CALLS = "rollout_"
"""Prefix of our own worker's methods. None of them brings weights."""


class Changes:
    """Weights changes of this process."""

    num = 0
    """Number of weights changes. 0: the weights of the start."""


def listen(model: nn.Module) -> None:
    """Count each load of weights into this model."""
    load_weights: Any = model.load_weights

    @wraps(load_weights)
    def load_and_count(*args: Any, **kwargs: Any) -> Any:
        Changes.num += 1  # also when it fails, since a part may be there
        return load_weights(*args, **kwargs)

    model.load_weights = load_and_count  # type: ignore[assignment]


def num_without_memory(models: Sequence[nn.Module]) -> int:
    """Number of the models' weights that are on the meta device."""
    return sum(weight.is_meta for model in models for weight in model.parameters())


def keep_old(model: nn.Module, config: ModelConfig) -> None:
    """After a load that failed, give each layer whose new weights are not complete its old ones.

    vLLM keeps them aside until then. The layer itself has no memory meanwhile.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.load_numel = 0
        info.loaded_weights.clear()
    finalize_layerwise_processing(model, config)


def listen_to_calls() -> None:
    """Let each engine core of this process note new weights after every call that may bring some.

    Its outputs then name them.

    vLLM's utility calls reach an engine core by name, and none of them informs its scheduler. If workers are separate
    processes, the scheduler would learn of new weights from the first step computed with them, one step late.
    """
    for name, followed_by in (
        ("collective_rpc", _look),
        ("add_lora", _look_at_adapter),
        ("set_weight_version", name_weights),
        *([("_attach_weight_version", _name_outputs)] if has(WEIGHT_SPANS) else ()),
    ):
        method = getattr(EngineCore, name)
        if not hasattr(method, "__wrapped__"):
            setattr(EngineCore, name, _followed(method, followed_by))


def _followed(method: Callable[..., Any], then: Callable[..., None]) -> Callable[..., Any]:
    @wraps(method)
    def called(core: EngineCore, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(core, *args, **kwargs)
        finally:
            if is_ours(core):
                then(core, *args, **kwargs)

    return called


def is_ours(core: EngineCore) -> bool:
    """True if the engine core has our scheduler. A process may have others, and a core that begins has none yet."""
    return hasattr(getattr(core, "scheduler", None), "weights")


def _look(core: EngineCore, method: object, *args: Any, **kwargs: Any) -> None:
    if not (isinstance(method, str) and method.startswith(OWN_CALLS)):
        Changes.num = max(Changes.num, _asked(core, "rollout_num_changes"))
        _weights_came(core)
        core.scheduler.hold(bool(_asked(core, "rollout_lacks_weights")))


def _look_at_adapter(core: EngineCore, adapter: Any, *args: Any, **kwargs: Any) -> None:
    """Count an adapter that replaces another one in place as a weights change of this adapter."""
    if adapter.load_inplace:
        _count(core, learned_name(adapter))


def name_weights(core: EngineCore, name: str, adapter: str = BASE_MODEL) -> None:
    """Name the newest weights of an adapter, or of the base model.

    A trainer that knows only vLLM's call names an adapter's weights by it, too. It then counts for all models.
    """
    if core.scheduler.weights.is_named_otherwise(name, adapter):  # they have come by a way that is not counted
        _count(core, adapter)
    core.scheduler.weights.name(name, adapter)


def _name_outputs(core: EngineCore, outputs: dict[int, EngineCoreOutputs]) -> None:
    """Name the weights that computed a step in its outputs. vLLM knows only names that a trainer gave, and only the
    newest one.
    """
    weights = core.scheduler.weights
    if weights.workers_count and weights.num_changes:
        for each in outputs.values():
            each.weight_version = weights.version(weights.sampling)


def _count(core: EngineCore, adapter: str = BASE_MODEL) -> None:
    Changes.num = max(Changes.num + 1, _asked(core, "rollout_count_change"))
    _weights_came(core, adapter)


def _weights_came(core: EngineCore, adapter: str = BASE_MODEL) -> None:
    if core.scheduler.weights.have_come(adapter):
        core.scheduler.weights.clean = partial(_asked, core, "rollout_clean_kv")


def _asked(core: EngineCore, method: str) -> int:
    """Largest answer of the workers. 0 if the workers are not ours. They have no such method, and are asked
    only once.
    """
    weights = core.scheduler.weights
    if not weights.workers_count:
        return 0
    try:
        return max(core.model_executor.collective_rpc(method))
    except Exception:  # a failed worker of ours ends the engine, which the call itself reports
        weights.workers_count = False
        return 0


CHUNK = 1 << 26
"""Elements of a KV cache that are looked at together, about."""


def clean(caches: Sequence[torch.Tensor]) -> bool:
    """Replace NaN and infinity by 0 in KV caches of floating-point numbers. Returns True if there was any.

    Caches of several types may be views of the same memory, as in hybrid models. They are left as they are: a number of
    one type can look like NaN in another.

    Weights that are not finite leave such values in blocks. The next request that gets such a block does not read them,
    but some attention kernels multiply them by 0, which is NaN.
    """
    kinds = {getattr(cache, "dtype", None) for cache in caches}
    if len(kinds) != 1 or kinds.isdisjoint((torch.float32, torch.float16, torch.bfloat16)):
        return False
    found = False
    for cache in caches:
        longest = max(cache.shape)  # usually of the blocks; a cache's layout may be none that can be viewed flat
        size = max(1, CHUNK * longest // cache.numel())
        for chunk in cache.split(size, cache.shape.index(longest)):
            if not chunk.sum(dtype=torch.float32).isfinite():  # without a copy; finite numbers may overflow, too
                found |= not bool(chunk.isfinite().all())
                chunk.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return found

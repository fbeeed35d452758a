"""Settings that give an engine in a trainer's own process groups: its arguments, and engine cores that Ctrl-C does not
end.

Invariant: values set by the caller stay, and values that cannot work are refused. An engine core ends when its parent
process stops it, or is gone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from multiprocessing import resource_tracker
from typing import Any, TypeVar

import torch._dynamo.config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine import utils

from vllm_rollout.adapter.compat import check_vllm_version
from vllm_rollout.adapter.names import CPU_EXECUTOR_CLS, SCHEDULER_CLS, WORKER_CLS
from vllm_rollout.config import CPU_BLOCK_SIZE_TOKENS
from vllm_rollout.models import resolve
from vllm_rollout.on_cpu import BINDING, COMPILE_NOTHING, WAIT_POLICY, compiler, embedded_settings, this_cpu

Args = TypeVar("Args", bound=EngineArgs)
LOOKED_AT = frozenset(
    {
        *("scheduler_cls", "worker_cls", "tensor_parallel_size", "pipeline_parallel_size"),
        *("block_size", "served_model_name", "distributed_executor_backend", "dtype", "enforce_eager"),
        *("kv_cache_memory_bytes", "gpu_memory_utilization"),
    }
)
"""Engine arguments that `group_settings` sets, or that decide what it sets."""


def group_settings(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` with the settings that groups need. Raises: ValueError for another scheduler or
    worker.
    """
    check_vllm_version()
    ours = {"scheduler_cls": SCHEDULER_CLS, "worker_cls": WORKER_CLS}
    for name, value in ours.items():
        if settings.get(name) not in (None, "auto", value):
            raise ValueError(f"{name} must be {value!r} here, got {settings[name]!r}. Leave it out, or use vllm.LLM.")
    resolved = resolve(model)
    defaults: dict[str, Any] = {}
    if resolved != model:
        defaults["served_model_name"] = model
    if current_platform.is_cpu():
        defaults |= cpu_settings(settings, is_embedded=resolved != model)
    given = {name: value for name, value in settings.items() if value is not None or name not in defaults}
    return {**defaults, **given, **ours, "model": resolved}


def cpu_settings(settings: dict[str, Any], is_embedded: bool) -> dict[str, Any]:
    """Settings of an engine on a CPU. `is_embedded`: its model is in the catalogue."""
    ours: dict[str, Any] = {"block_size": CPU_BLOCK_SIZE_TOKENS}
    num_workers = settings.get("tensor_parallel_size", 1) * settings.get("pipeline_parallel_size", 1)
    if num_workers == 1 and os.environ.get(BINDING, "nobind") == "nobind":
        ours["distributed_executor_backend"] = CPU_EXECUTOR_CLS
        os.environ.setdefault(*WAIT_POLICY)  # for the engine core, which is a new process
    if compiler() is None:
        ours["enforce_eager"] = True
        os.environ.setdefault(*COMPILE_NOTHING)  # for a new process
        torch._dynamo.config.disable = True  # for this one, and for its forks
    if is_embedded:
        ours |= embedded_settings(this_cpu(), os.environ)
        if settings.get("gpu_memory_utilization") is not None:
            ours.pop("kv_cache_memory_bytes", None)
    return ours


def with_groups(engine_args: Args) -> Args:
    """Engine arguments with the settings of `group_settings`. Raises: ValueError."""
    looked_at = [(field, getattr(engine_args, field.name)) for field in fields(engine_args) if field.name in LOOKED_AT]
    given = {field.name: value for field, value in looked_at if value != field.default}
    return replace(engine_args, **group_settings(engine_args.model, given))


class UninterruptedProcesses(utils.CoreEngineProcManager):
    """Engine cores that no SIGINT reaches. A terminal sends SIGINT to all processes, and vLLM's engine core would end.

    The process that waits for them gets the signal, stops running work, and may go on. Overrides: __init__.
    """

    def __init__(self, local_engine_count: int, start_index: int, *args: Any, **kwargs: Any) -> None:
        resource_tracker.ensure_running()  # started below, it would let SIGINT through again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().__init__(local_engine_count, start_index, *args, **kwargs)  # its processes inherit the mask
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Engines that are built inside the block have `UninterruptedProcesses`."""
    before, utils.CoreEngineProcManager = utils.CoreEngineProcManager, UninterruptedProcesses  # type: ignore[misc]
    try:
        yield
    finally:
        utils.CoreEngineProcManager = before  # type: ignore[misc]

"""Settings of an engine that is an emulated device."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from vllm import envs
from vllm.config import VllmConfig

from vllm_rollout.adapter.options import Options, ServeOptions

WORKER_CLS = "vllm_rollout.parts.emulation.worker.worker.EmulatedWorker"
EXECUTOR_CLS = "vllm_rollout.parts.emulation.worker.executor.EmulatedExecutor"


@dataclass(frozen=True, slots=True)
class EmulationOptions(Options):
    """Values of the emulation flags."""

    PART = "emulation"

    file: str | None = None
    """File that says what the device does. None: no device is emulated."""
    speed: float = 1.0
    log: str | None = None
    async_scheduling: bool = False
    """The user's setting. The platform may have switched vLLM's own setting off."""
    num_ranks: int = 1
    """Number of data-parallel ranks. (An engine core of a dense model knows only itself.)"""
    log_goes_on: bool = False
    """True if the engine replaces another one, whose steps stay in the log."""


def emulate(args: Any, **options: Any) -> None:
    """Let an engine with these arguments be an emulated device. `args`: of a command line, or vLLM's `EngineArgs`."""
    args.worker_cls = WORKER_CLS
    args.distributed_executor_backend = EXECUTOR_CLS
    args.async_scheduling = False  # as the platform requires. The executor restores the user's setting
    args.enforce_eager = True
    # Without a model there is no trained length.
    os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    envs.disable_envs_cache()  # after an engine of this process, vLLM reads no variable again
    EmulationOptions.change(args, num_ranks=args.data_parallel_size, **options)
    ServeOptions.change(args, has_model=False)


def go_on(config: VllmConfig) -> None:
    """Let an engine go on with the log of the engine that it replaces."""
    if EmulationOptions.of(config).file is not None:
        EmulationOptions.change(config, log_goes_on=True)

"""Runs the only worker of a CPU engine inside the engine core.

vLLM's CPU platform gives each worker a process of its own. That process takes ten seconds to start, and the engine core
spins on a core while it waits for each step.
"""

from __future__ import annotations

from multiprocessing import parent_process

import torch
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.on_cpu import this_cpu


class CpuExecutor(UniProcExecutor):
    """Executor with the worker in the engine core's process. Overrides: _init_executor."""

    def _init_executor(self) -> None:
        if parent_process() is not None:  # else it is a trainer's own process, which sets its own threads
            num_ranks = ServeOptions.of(self.vllm_config).num_local_ranks
            torch.set_num_threads(max(1, this_cpu().num_cores // num_ranks))
        super()._init_executor()

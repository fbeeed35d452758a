"""Engine cores that begin as copies of the API process: ten seconds sooner than a process that imports vLLM again.

vLLM copies the API process on a GPU. Its CPU platform starts new processes, because OpenMP reads the number of threads
when a process starts. `kernel/worker/cpu_executor.py` sets that number later.
"""

from __future__ import annotations

import os

from vllm.config import VllmConfig

from vllm_rollout.adapter.options import ServeOptions


def fork_engines(vllm_config: VllmConfig) -> None:
    """Make engine cores copies of this process. Call this before the process starts them.

    A process that has computed with several threads must not be copied: OpenMP would wait for ever for threads that the
    copy does not have. An API process computes only with images and sounds. Engines that are rebuilt while the server
    runs are not copied either (`ServeOptions.forks`).
    """
    if ServeOptions.of(vllm_config).forks and not vllm_config.model_config.is_multimodal_model:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

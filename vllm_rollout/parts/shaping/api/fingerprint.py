"""Everything that PTL depends on, read from a configured engine: the model's shape, the hardware, flags and versions.

Invariant: values are plain text, numbers and booleans. A profiler and a server with the same flags give equal values.
"""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform

import vllm_rollout
from vllm_rollout.adapter.compat import vllm_version
from vllm_rollout.on_cpu import this_cpu


def fingerprint_of(config: VllmConfig) -> dict[str, Any]:
    """Properties of the model on which the time of a step depends. Weights of one architecture cost the same."""
    model = config.model_config
    return {
        "architecture": model.architecture,
        "hidden_size": model.get_hidden_size(),
        "num_layers": model.get_total_num_hidden_layers(),
        "num_attention_heads": model.get_num_attention_heads(config.parallel_config)
        * config.parallel_config.tensor_parallel_size,
        "num_kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "vocab_size": model.get_vocab_size(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
    }


def hardware_of(config: VllmConfig) -> dict[str, Any]:
    """Device, number of devices, CPU and number of cores."""
    cpu = this_cpu().name
    return {
        "device": cpu if current_platform.is_cpu() else current_platform.get_device_name(),
        "num_devices": 1 if current_platform.is_cpu() else torch.accelerator.device_count(),
        "cpu": cpu,
        "num_cpus": os.cpu_count(),
    }


def engine_flags(config: VllmConfig) -> dict[str, Any]:
    """Settings on which the time of a step depends, as they are in effect."""
    cache, parallel = config.cache_config, config.parallel_config
    return {
        "enforce_eager": config.model_config.enforce_eager,
        "block_size": cache.block_size,
        "kv_cache_dtype": cache.cache_dtype,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "speculative_decoding": config.speculative_config is not None,
        "cpu_binding": envs.VLLM_CPU_OMP_THREADS_BIND if current_platform.is_cpu() else None,
    }


def versions() -> dict[str, str]:
    return {
        "vllm_rollout": vllm_rollout.__version__,
        "vllm": vllm_version,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }

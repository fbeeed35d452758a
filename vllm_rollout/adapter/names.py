"""What vLLM is told to build engines of, and what its adapters are called.

Invariant: the former are names in `vllm_rollout`, so that anybody can write them; every process says the latter alike.
"""

from __future__ import annotations

from vllm.lora.request import LoRARequest

from vllm_rollout.group.plans.prompt_key import kept_name
from vllm_rollout.group.types import BASE_MODEL

SCHEDULER_CLS = "vllm_rollout.Scheduler"
WORKER_CLS = "vllm_rollout.Worker"
CPU_EXECUTOR_CLS = "vllm_rollout.adapter.worker.cpu_executor.CpuExecutor"


def learned_name(lora: LoRARequest | None) -> str:
    """Under which what is learned of an adapter is kept."""
    return BASE_MODEL if lora is None else kept_name(lora.lora_name)

"""What vLLM is told to build engines of, and what its adapters are called.

Invariant: the former are names in `vllm_rollout`, so that anybody can write them; every process says the latter alike.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import copy

from vllm.lora.request import LoRARequest

from vllm_rollout.group.plans.prompt_key import kept_name
from vllm_rollout.group.types import BASE_MODEL

SCHEDULER_CLS = "vllm_rollout.Scheduler"
WORKER_CLS = "vllm_rollout.Worker"
CPU_EXECUTOR_CLS = "vllm_rollout.adapter.worker.cpu_executor.CpuExecutor"
EMULATED_WORKER_CLS = "vllm_rollout.adapter.worker.emulated.EmulatedWorker"
EMULATED_EXECUTOR_CLS = "vllm_rollout.adapter.worker.emulated_executor.EmulatedExecutor"


NUMBER_FOLLOWS = "\x1f"
"""Between a served name and an adapter's number. No client can send it in a name of vLLM's."""
MAX_NAMES = 1024
"""Served names that are remembered; who names each step's adapter anew makes no end of them."""


def learned_name(lora: LoRARequest | None) -> str:
    """Under which what is learned of an adapter is kept: the name that it is served by."""
    return BASE_MODEL if lora is None else kept_name(lora.lora_name.partition(NUMBER_FOLLOWS)[0])


class AdapterNames:
    """Gives each adapter a name of its own inside the engine.

    vLLM takes adapters of one name for one adapter. Unloaded and loaded again under its name, the old one still runs
    beside the new one: a step then prepares only one of the two, and ends the engine where it looks for the other. The
    prefix cache goes by the name as well.
    """

    def __init__(self) -> None:
        self._first: OrderedDict[str, int] = OrderedDict()
        """The number of the first adapter that was served by a name: that one keeps it."""

    def told_apart(self, lora: LoRARequest) -> LoRARequest:
        """`lora` itself, or one of another name where the name was an earlier adapter's."""
        if NUMBER_FOLLOWS in lora.lora_name:
            return lora
        first = self._first.setdefault(lora.lora_name, lora.lora_int_id)
        if len(self._first) > MAX_NAMES:
            self._first.popitem(last=False)
        if lora.lora_int_id == first:
            return lora
        named = copy(lora)
        named.lora_name = f"{lora.lora_name}{NUMBER_FOLLOWS}{lora.lora_int_id}"
        return named

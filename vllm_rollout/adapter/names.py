"""Names of our classes in vLLM's settings, and names of adapters.

Invariant: public class names are in `vllm_rollout`, so that users can write them. Every process names an adapter alike.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import copy

from vllm.lora.request import LoRARequest

from vllm_rollout.kernel.rules.prompt_key import kept_name
from vllm_rollout.kernel.rules.types import BASE_MODEL

SCHEDULER_CLS = "vllm_rollout.Scheduler"
WORKER_CLS = "vllm_rollout.Worker"
CPU_EXECUTOR_CLS = "vllm_rollout.kernel.worker.cpu_executor.CpuExecutor"

NUMBER_FOLLOWS = "\x1f"
"""Separates a served name and an adapter's number. No client can send it in a name of vLLM's."""
MAX_NAMES = 1024
"""Limit of remembered served names, for clients that name each step's adapter anew."""


def learned_name(lora: LoRARequest | None) -> str:
    """Name under which an adapter's learned data are kept: its served name."""
    return BASE_MODEL if lora is None else kept_name(lora.lora_name.partition(NUMBER_FOLLOWS)[0])


class AdapterNames:
    """Gives each adapter a unique name inside the engine.

    vLLM treats adapters with the same name as one adapter. If an adapter is unloaded and loaded again under its name,
    the old one may still run beside the new one. A step then prepares only one of the two, and looking for the other
    ends the engine. The prefix cache uses the name as well.
    """

    def __init__(self) -> None:
        self._first: OrderedDict[str, int] = OrderedDict()
        """Number of the first adapter with a served name. This adapter keeps the name."""

    def told_apart(self, lora: LoRARequest) -> LoRARequest:
        """`lora` itself, or a copy with another name if an earlier adapter had the name."""
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

"""Where the engine core's thread is, sampled inside it: a `--worker-extension-cls` for the emulated worker, which runs
there. A thread looks at the main thread's stack; it takes the interpreter for some microseconds each time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence

INTERVAL_S = 0.005
OURS = ("vllm_rollout", "vllm")
WAITS = "waits"
WAITING = ("vllm_rollout.adapter.worker.emulated:get_output", "vllm.v1.engine.core:_process_input_queue")
"""Innermost functions that wait for the device, or for something to do."""
STAGES = {
    "vllm.v1.core.sched.scheduler:schedule": "vLLM's Scheduler.schedule",
    "vllm.v1.core.sched.scheduler:update_from_output": "vLLM's Scheduler.update_from_output",
    "vllm_rollout.adapter.core.": "our scheduler",
    "vllm_rollout.adapter.worker.": "the emulated device",
}
"""By what functions begin with."""


class StackSampler:
    """Mixed into the worker. Called by `collective_rpc`."""

    def start_sampling_stacks(self) -> None:
        self.sampled_stacks: Counter[tuple[str, str]] = Counter()
        self.is_sampling_stacks = True
        main = threading.main_thread().ident

        def sample() -> None:
            while self.is_sampling_stacks:
                self.sampled_stacks[_where(main)] += 1
                time.sleep(INTERVAL_S)

        threading.Thread(target=sample, daemon=True).start()

    def stop_sampling_stacks(self) -> list[tuple[str, str, int]]:
        """(stage, innermost function of vLLM's or ours, samples)."""
        self.is_sampling_stacks = False
        return [(*where, count) for where, count in self.sampled_stacks.items()]


def _where(thread: int | None) -> tuple[str, str]:
    frame = sys._current_frames().get(thread or 0)
    functions = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in OURS:
            functions.append(f"{module}:{frame.f_code.co_name}")
        frame = frame.f_back
    return stage_of(functions), functions[0] if functions else "elsewhere"


def stage_of(functions: Sequence[str]) -> str:
    """What the engine core is about; its functions from the innermost on."""
    if functions and functions[0] in WAITING:
        return WAITS
    for function in functions:
        for prefix, stage in STAGES.items():
            if function.startswith(prefix):
                return stage
    return "rest of the engine core"

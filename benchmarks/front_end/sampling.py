"""Where the engine core's thread spends its CPU time, sampled inside it: a `--worker-extension-cls` for the emulated
worker, which runs there. A timer of the process's CPU time interrupts it. A thread that looked at it from outside would
get its turn when the engine core gives the interpreter away, and so see it writing files most of the time.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from types import FrameType

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
        signal.signal(signal.SIGPROF, lambda _, frame: self.sampled_stacks.update([_where(frame)]))
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)

    def stop_sampling_stacks(self) -> list[tuple[str, str, int]]:
        """(stage, innermost function of vLLM's or ours, samples)."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        return [(*where, count) for where, count in self.sampled_stacks.items()]


def _where(frame: FrameType | None) -> tuple[str, str]:
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

"""Where the engine core's thread is, sampled inside it: a `--worker-extension-cls` for the emulated worker, which runs
there. A thread looks at the main thread's stack; it takes the interpreter for some microseconds each time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter

INTERVAL_S = 0.005
OURS = ("vllm_rollout", "vllm")


class StackSampler:
    """Mixed into the worker. Called by `collective_rpc`."""

    def start_sampling_stacks(self) -> None:
        self.sampled_stacks: Counter[str] = Counter()
        self.is_sampling_stacks = True
        main = threading.main_thread().ident

        def sample() -> None:
            while self.is_sampling_stacks:
                self.sampled_stacks[_where(main)] += 1
                time.sleep(INTERVAL_S)

        threading.Thread(target=sample, daemon=True).start()

    def stop_sampling_stacks(self) -> dict[str, int]:
        """Samples by the innermost function of vLLM's or ours."""
        self.is_sampling_stacks = False
        return dict(self.sampled_stacks)


def _where(thread: int | None) -> str:
    frame = sys._current_frames().get(thread or 0)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in OURS:
            return f"{module}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"

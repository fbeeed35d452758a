"""Engine cores of an LLM in a trainer's own process, which are not its first concern when a user presses Ctrl-C.

Invariant: an engine core ends when the process that it works for says so, or is gone.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

from vllm.v1.engine import utils

from vllm_rollout.adapter.api.calls.deaths import RankProcesses


class UninterruptedProcesses(RankProcesses):
    """Engine cores that no SIGINT reaches: a terminal sends it to all processes, and vLLM's engine core would end.

    Whoever waits for them gets it, stops what runs, and may go on. Overrides: __init__.
    """

    def __init__(self, local_engine_count: int, start_index: int, *args: Any, **kwargs: Any) -> None:
        resource_tracker.ensure_running()  # started below, it would let SIGINT through again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().__init__(local_engine_count, start_index, *args, **kwargs)  # whose processes inherit the mask
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Engines that are built meanwhile have such processes."""
    before, utils.CoreEngineProcManager = utils.CoreEngineProcManager, UninterruptedProcesses  # type: ignore[misc]
    try:
        yield
    finally:
        utils.CoreEngineProcManager = before  # type: ignore[misc]

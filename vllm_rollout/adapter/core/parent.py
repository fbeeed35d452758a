"""An engine core ends with the process that started it. Runs in the engine core.

vLLM's goes on when its API process is killed, with its memory and the address that the server listened at, so that
nobody can start it there again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.process import BaseProcess

KILL_AFTER_S = 10.0
"""That an engine core has to stop its workers."""


def end_with_parent() -> None:
    """From now on, if this is an engine core's own process: not where an engine runs in its user's, or under Ray."""
    parent = multiprocessing.parent_process()
    if parent is not None and multiprocessing.current_process().name.startswith("EngineCore"):
        threading.Thread(target=_end_after, args=(parent,), name="vllm_rollout-parent", daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(KILL_AFTER_S)
    os.kill(os.getpid(), signal.SIGKILL)

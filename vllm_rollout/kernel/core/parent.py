"""Ends an engine core together with the process that started it. Runs in the engine core.

Without this, vLLM's engine core goes on when its API process is killed. It keeps its memory and the server's address,
so that no server can start there.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.process import BaseProcess

KILL_AFTER_S = 10.0
"""Seconds that an engine core has to stop its workers."""


def end_with_parent() -> None:
    """Watch the parent process, if this is an engine core's own process. Does nothing if an engine runs in its user's
    process, or under Ray.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and multiprocessing.current_process().name.startswith("EngineCore"):
        threading.Thread(target=_end_after, args=(parent,), name="vllm_rollout-parent", daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(KILL_AFTER_S)
    os.kill(os.getpid(), signal.SIGKILL)

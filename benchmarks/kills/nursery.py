"""Servers that start in a second or so: a process that has imported vLLM forks one for each line that it reads.

Invariant: it has one thread, and no server of it lives when it ends.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Reads `start LOG` and `reap PID` from its standard input; answers a line to each."""
    arguments = sys.argv[1:]
    _import_everything(arguments)
    print("warm", flush=True)
    pids: set[int] = set()
    try:
        for line in sys.stdin:
            word, argument = line.split()
            if word == "start":
                pid = _fork_server(arguments, argument)
                pids.add(pid)
                print(pid, flush=True)
            else:
                os.waitpid(int(argument), 0)
                pids.discard(int(argument))
                print("reaped", flush=True)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _import_everything(arguments: list[str]) -> None:
    from vllm_rollout.adapter.platform import choose_platform

    choose_platform(arguments)
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.engine.utils

    import vllm_rollout.adapter.api.client.client
    import vllm_rollout.adapter.api.engine.engine
    import vllm_rollout.adapter.api.start.serve
    import vllm_rollout.adapter.worker.emulated
    import vllm_rollout.adapter.worker.emulated_executor  # noqa: F401

    # vLLM's CPU platform asks for `spawn`, which would import all of it again for the engine core.
    vllm.v1.engine.utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    gc.collect()
    gc.freeze()


def _fork_server(arguments: list[str], log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in ((0, nothing), (1, output), (2, output)):
        os.dup2(file, number)
    try:
        from vllm_rollout.adapter.api.start.serve import main as serve

        serve(list(arguments))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()

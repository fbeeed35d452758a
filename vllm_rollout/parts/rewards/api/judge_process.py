"""The process that keeps a judge's server running beside ours: `python -m …judge_process`, settings as JSON on stdin.

Invariant: when the process that started it ends, it ends together with its server. A server that dies is started again
after growing pauses. A server that never ran is not started again.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from vllm_rollout.parts.rewards.grading.judge import JudgeEngine
from vllm_rollout.process import ServerError, ServerProcess, exit_on_sigterm

PR_SET_PDEATHSIG = 1
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0
LOOK_S = 0.5
"""Seconds between two checks whether the server lives."""


class JudgeProcess(msgspec.Struct, frozen=True):
    """Settings of the judge's server and of its process."""

    command: list[str]
    environment: dict[str, str]
    port: int
    api_key: str
    file: str
    """File of the `JudgeEngine`. It is written once the server answers for the first time, or has failed to start."""
    log: str
    cores: list[int]
    """Cores for the server. Empty: the same as the starting process."""
    parent: int


def main() -> None:
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=JudgeProcess)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    exit_on_sigterm()
    if os.getppid() == settings.parent:  # else it ended before the line above
        keep(settings)


def keep(settings: JudgeProcess) -> None:
    """Keep a server running. Returns if it fails before it has ever answered."""
    if settings.cores:
        os.sched_setaffinity(0, settings.cores)
    server = ServerProcess(settings.command, settings.port, settings.environment, Path(settings.log))
    engine = JudgeEngine(server.url, settings.api_key)
    has_run, pause_s = False, FIRST_PAUSE_S
    while True:
        try:
            with server:
                server.wait_until_healthy(lambda seconds, line: None)
                engine.write(Path(settings.file))
                has_run, began = True, time.monotonic()
                while True:
                    server.check_alive()
                    if time.monotonic() - began > LAST_PAUSE_S:
                        pause_s = FIRST_PAUSE_S
                    time.sleep(LOOK_S)
        except ServerError as error:
            failure = str(error) if not has_run else str(error).partition("\n")[0]
            msgspec.structs.replace(engine, failure=failure).write(Path(settings.file))
        if not has_run:
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)


if __name__ == "__main__":
    main()

"""The process in which reward functions run, and from which programs are run in the sandbox.

It is started as `python -m vllm_rollout.parts.rewards.grading.process FD MEMORY_BYTES`.

Invariant: it takes one trajectory at a time and answers one `Grade` for each. Output of a function is discarded. The
folder that a function changes to and the children that it leaves are gone before the next trajectory. A second process,
its parent, does nothing but outlive it. If the function or the server dies, all that was started ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import Any, NoReturn

import cloudpickle
import psutil

from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.parts.rewards.grading.family import descendants, end_descendants
from vllm_rollout.parts.rewards.grading.frames import BrokenFrame, GradedJob, GradingJob, Load, encode, receive
from vllm_rollout.parts.rewards.grading.functions import caller, described, grade, load
from vllm_rollout.parts.rewards.grading.program_tests import TestJob, TestRun, run_test
from vllm_rollout.parts.rewards.grading.sandbox import SandboxError
from vllm_rollout.parts.rewards.grading.values import Trajectory, failed, written

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
REQUIRED = {"vllm_rollout.parts.rewards.grading.builtin:math": "math_verify"}
"""Packages that a function would otherwise import within the time limit of its first trajectory."""


def main() -> None:
    connection, memory_bytes = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    if worker := os.fork():
        connection.close()
        _outlive(worker)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    _work(connection, memory_bytes)


def _outlive(worker: int) -> NoReturn:
    """Wait until the worker or the server ends. Then end all that the worker has started, also detached processes."""
    try:
        while os.wait()[0] != worker:
            pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            while True:  # a process that a look has missed becomes a child of this one, when its parents are gone
                end_descendants(os.getpid())
                os.wait()
        finally:  # it has no child any more
            os._exit(0)


def _work(connection: socket.socket, memory_bytes: int) -> None:
    worker = os.getpid()
    try:
        home = tempfile.tempdir = os.getcwd()
    except FileNotFoundError:  # the caller has left meanwhile
        return
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    calls: dict[str, Callable[[Trajectory], Any] | str] = {}
    with suppress(BrokenFrame):
        while True:
            message = receive(connection, Load | GradingJob | TestJob)
            if isinstance(message, Load):
                call = calls[message.name] = _loaded(message)
                _limit_memory(memory_bytes)
                connection.sendall(encode(GradedJob(failed(call) if isinstance(call, str) else Grade("ok"))))
            elif isinstance(message, TestJob):
                try:
                    os.makedirs(home, exist_ok=True)
                    run = asyncio.run(run_test(message))
                except (SandboxError, OSError) as error:
                    run = TestRun("exited", False, 0.0, failure=written(str(error)))
                _end_children()  # bubblewrap ends before the process in its namespace
                connection.sendall(encode(run))
            else:
                os.makedirs(home, exist_ok=True)  # the function before may have removed it
                os.chdir(home)
                grade = _graded(calls[message.name], message.asked)
                if os.getpid() != worker:  # the function forked, and both came back
                    os._exit(0)
                signal.setitimer(signal.ITIMER_REAL, 0)
                left_children = bool(descendants(os.getpid()))
                _end_children()
                connection.sendall(encode(GradedJob(grade, left_children)))


def _loaded(message: Load) -> Callable[[Trajectory], Any] | str:
    """Function that calls the loaded reward function, or the reason why it cannot be loaded."""
    try:
        if message.place in REQUIRED:
            import_module(REQUIRED[message.place])
        return caller(load(message.place) if message.place else cloudpickle.loads(message.pickled))
    except Exception as error:  # a user's module may raise anything while it is imported
        return f"the reward function cannot be loaded: {described(error)}"


def _graded(call: Callable[[Trajectory], Any] | str, trajectory: Trajectory) -> Grade:
    if isinstance(call, str):  # the second trajectory of a function that could not be loaded
        return failed(call)
    began = time.monotonic()
    said = grade(call, trajectory)
    return replace(said, seconds=time.monotonic() - began)


def _limit_memory(memory_bytes: int) -> None:
    """Limit memory to `memory_bytes` beyond what the functions' modules have taken already."""
    limit = psutil.Process().memory_info().vms + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _end_children() -> None:
    """End all processes that the function left. Its orphans are children of this process, which adopts them."""
    end_descendants(os.getpid())
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main()

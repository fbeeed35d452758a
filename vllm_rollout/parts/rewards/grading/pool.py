"""A bounded number of grading processes. A process that takes too long, grows or leaks is killed and replaced.

Invariant: a slot holds at most one process, and a process grades one trajectory at a time.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from vllm_rollout.background import spawn
from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.parts.rewards.grading.clock import MAX_STRETCH, WorkClock
from vllm_rollout.parts.rewards.grading.family import descendants, end_descendants, held_bytes
from vllm_rollout.parts.rewards.grading.frames import BrokenFrame, GradedJob, GradingJob, Load, encode, read
from vllm_rollout.parts.rewards.grading.program_tests import TestJob, TestRun
from vllm_rollout.parts.rewards.grading.sandbox import KILL_S, SandboxError
from vllm_rollout.parts.rewards.grading.values import Trajectory, failed

LOAD_S = 60.0
"""Seconds for loading a function: its module may import much."""


class WatcherEnded(SandboxError):
    """The process that watched a program ended, for whatever reason."""


@dataclass(frozen=True, slots=True)
class ProcessBounds:
    memory_bytes: int = 4 << 30
    """Memory beyond that of the functions' modules. A process that has grown by half of it is replaced."""
    max_jobs: int = 10_000
    """Trajectories after which a process is replaced."""


class GradingProcesses:
    """Grading processes that wait for work. If none waits, a new one starts, so callers bound their number."""

    def __init__(self, bounds: ProcessBounds) -> None:
        self._bounds = bounds
        self._idle: list[GradingProcess] = []
        self._in_use: set[GradingProcess] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @cached_property
    def _home(self) -> tempfile.TemporaryDirectory[str]:
        """Folder that holds the working folder of each process. It is removed with this process at the latest."""
        return tempfile.TemporaryDirectory(prefix="vllm-rollout-rewards-", ignore_cleanup_errors=True)

    @asynccontextmanager
    async def one(self) -> AsyncIterator[GradingProcess]:
        """A process for one trajectory. Raises: OSError if the pool is closed or no process can be started."""
        if self._is_closed:
            raise OSError("its grader has ended")
        while self._idle and self._idle[-1].is_spent:  # the process ended meanwhile
            self._end(self._idle.pop())
        process = self._idle.pop() if self._idle else await GradingProcess.start(self._bounds, self._home.name)
        self._in_use.add(process)
        try:
            yield process
        finally:
            self._in_use.discard(process)
            if self._is_closed or process.is_spent:
                self._end(process)
            else:
                self._idle.append(process)

    async def close(self) -> None:
        """End all processes. A caller that still uses one gets an error."""
        self._is_closed = True
        for process in (*self._idle, *self._in_use):
            self._end(process)
        self._idle.clear()
        if self._ending:
            await asyncio.wait(self._ending, timeout=KILL_S)
        if "_home" in vars(self):
            self._home.cleanup()

    def _end(self, process: GradingProcess) -> None:
        process.kill()
        spawn(process.wait(), "end of a grading process", self._ending)


class GradingProcess:
    """One grading process and its parent, which outlives it. It takes one trajectory at a time."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path, bounds: ProcessBounds) -> None:
        self._process, self._folder, self._bounds = process, folder, bounds
        self._loaded: set[str] = set()
        self._num_jobs = 0
        self._is_killed = False
        self._has_lost_children = False
        self._first_bytes = 0
        """Memory after the first trajectory, in bytes. 0 before."""
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, bounds: ProcessBounds, home: str) -> GradingProcess:
        ours, theirs = socket.socketpair()
        folder = Path(tempfile.mkdtemp(dir=home))
        module = ("-m", "vllm_rollout.parts.rewards.grading.process", str(theirs.fileno()), str(bounds.memory_bytes))
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, *module),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                    cwd=folder,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])},
                )
            self = cls(process, folder, bounds)
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException:  # also a cancellation. A process that is there already ends with its connection
            ours.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return self

    @property
    def is_spent(self) -> bool:
        """True if the process must be replaced: it ended, graded enough, grew too much, or lost children that its
        function may need."""
        if self._is_killed or self._has_lost_children:
            return True
        if self._process.returncode is not None or self._num_jobs >= self._bounds.max_jobs:
            return True
        return bool(self._first_bytes) and self._bytes() - self._first_bytes > self._bounds.memory_bytes / 2

    async def grade(self, function: Load, trajectory: Trajectory, limit_s: float) -> Grade:
        """Grade one trajectory. The process is killed after a timeout, a cancellation or a broken answer.

        Raises: TypeError or ValueError for data that cannot be sent.
        """
        job = encode(GradingJob.of(function.name, trajectory))
        loaded = await self.load(function)
        if loaded.status != "ok":
            return loaded
        grade = await self._asked(job, limit_s)
        self._num_jobs += 1
        self._first_bytes = self._first_bytes or self._bytes()
        return grade

    async def load(self, function: Load) -> Grade:
        """Load a function. Returns `ok`, or `error` with the reason. If it is loaded already, this returns at once."""
        if function.name in self._loaded:
            return Grade("ok")
        loaded = await self._asked(encode(function), LOAD_S)
        if loaded.status == "timeout":
            return failed(f"the reward function could not be loaded within {LOAD_S:.3g} s")
        if loaded.status == "ok":
            self._loaded.add(function.name)
        return loaded

    async def run_test(self, job: TestJob) -> TestRun:
        """Run a test of a program. The process itself watches the program.

        If the process does not answer in time, the program took too long.

        Raises: WatcherEnded if the process ends. SandboxError if no program was started. TypeError or ValueError for a
        job that cannot be sent.
        """
        frame = encode(job)
        self._num_jobs += 1
        is_done = False
        try:
            self._writer.write(frame)
            async with asyncio.timeout(MAX_STRETCH * job.limit_s + LOAD_S + KILL_S):
                run = await read(self._reader, TestRun)
            is_done = True
        except TimeoutError:
            return TestRun("timeout", False, MAX_STRETCH * job.limit_s)
        except BrokenFrame as error:
            raise WatcherEnded("the process that watches the program ended") from error
        finally:
            if not is_done:
                self.kill()
        if run.failure is not None:
            raise SandboxError(run.failure)
        return run

    async def _asked(self, frame: bytes, limit_s: float) -> Grade:
        clock = WorkClock(self._process.pid)
        self._writer.write(frame)
        answer = asyncio.ensure_future(read(self._reader, GradedJob))
        try:
            while not answer.done() and (left_s := clock.left_s(limit_s)) > 0:
                await asyncio.wait([answer], timeout=max(0.01, left_s))
            work_s = clock.work_s
            if answer.done():
                grade = answer.result().grade
                self._has_lost_children |= answer.result().left_children
                return replace(grade, seconds=min(work_s, grade.seconds))
            self.kill()
            return Grade("timeout", 0.0, f"it took more than {limit_s:.3g} s", seconds=work_s)
        except BrokenFrame:
            self.kill()
            return failed("the process of the reward function ended: by the function, or out of memory", clock.work_s)
        except asyncio.CancelledError:
            self.kill()
            raise
        finally:
            answer.cancel()

    def kill(self) -> None:
        """Kill the process and all that it started, without waiting. In an uninterruptible call a process ends when the
        call returns."""
        if self._is_killed:
            return
        self._is_killed = True
        with suppress(ProcessLookupError):
            if self._process.returncode is None:
                os.kill(self._process.pid, signal.SIGSTOP)
                end_descendants(self._process.pid)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._writer.close()
        threading.Thread(target=shutil.rmtree, args=(self._folder,), kwargs={"ignore_errors": True}).start()

    async def wait(self) -> int:
        return await self._process.wait()

    def _bytes(self) -> int:
        return held_bytes(descendants(self._process.pid))

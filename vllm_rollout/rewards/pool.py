"""Processes that grade, a bounded number of them: killed and replaced when one takes too long, grows or leaks.

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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from vllm_rollout.rewards.clock import WorkClock
from vllm_rollout.rewards.frames import BrokenFrame, GradingJob, Load, encode, read
from vllm_rollout.rewards.values import Grade, Trajectory, failed

LOAD_S = 60.0
"""For loading a function: its module may import much."""


@dataclass(frozen=True, slots=True)
class ProcessBounds:
    memory_bytes: int = 4 << 30
    """More than the functions' modules take. A process that has grown by half of it is replaced."""
    max_jobs: int = 10_000
    """Then a process is replaced."""


class GradingProcesses:
    """Those that wait for work. A new one is started when none does, so callers bound how many there are."""

    def __init__(self, bounds: ProcessBounds) -> None:
        self._bounds = bounds
        self._idle: list[GradingProcess] = []

    @asynccontextmanager
    async def one(self) -> AsyncIterator[GradingProcess]:
        process = self._idle.pop() if self._idle else await GradingProcess.start(self._bounds)
        try:
            yield process
        finally:
            if process.is_spent:
                process.kill()
            else:
                self._idle.append(process)

    def kill(self) -> None:
        while self._idle:
            self._idle.pop().kill()


class GradingProcess:
    """One process. Not for two trajectories at once."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path, bounds: ProcessBounds) -> None:
        self._process, self._folder, self._bounds = process, folder, bounds
        self._loaded: set[str] = set()
        self._num_jobs = 0
        self._is_killed = False
        self._first_bytes: int | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, bounds: ProcessBounds) -> GradingProcess:
        ours, theirs = socket.socketpair()
        folder = Path(tempfile.mkdtemp(prefix="vllm-rollout-reward-"))
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "vllm_rollout.rewards.process", str(theirs.fileno()), str(bounds.memory_bytes)),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])},
            )
        self = cls(process, folder, bounds)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        return self

    @property
    def is_spent(self) -> bool:
        """Whether it ended, has graded enough or has grown too much."""
        if self._is_killed or self._process.returncode is not None or self._num_jobs >= self._bounds.max_jobs:
            return True
        return self._bytes() - (self._first_bytes or self._bytes()) > self._bounds.memory_bytes / 2

    async def grade(self, function: Load, trajectory: Trajectory, limit_s: float) -> Grade:
        """Its process is gone after a timeout, a cancellation or an answer that is none.

        Raises: TypeError or ValueError for data that cannot be sent.
        """
        job = encode(GradingJob(function.name, trajectory))
        if function.name not in self._loaded:
            loaded = await self._asked(encode(function), LOAD_S)
            if loaded.status != "ok":
                return loaded
            self._loaded.add(function.name)
        grade = await self._asked(job, limit_s)
        self._num_jobs += 1
        self._first_bytes = self._first_bytes or self._bytes()
        return grade

    async def _asked(self, frame: bytes, limit_s: float) -> Grade:
        clock = WorkClock(self._process.pid)
        self._writer.write(frame)
        answer = asyncio.ensure_future(read(self._reader, Grade))
        try:
            while not answer.done() and (left_s := clock.left_s(limit_s)) > 0:
                await asyncio.wait([answer], timeout=max(0.01, left_s))
            work_s = clock.work_s
            if answer.done():
                grade = answer.result()
                return msgspec.structs.replace(grade, seconds=min(work_s, grade.seconds))
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
        """It and all that it started. Does not wait: a process in an uninterruptible call ends when that returns."""
        self._is_killed = True
        with suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    child.kill()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._writer.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _bytes(self) -> int:
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:
            return 0

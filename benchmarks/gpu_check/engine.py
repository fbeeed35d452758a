"""Engines in processes that are copies of this one, each with settings and environment of its own.

Invariant: an engine ends with its `with` block, with `stop`, and with the process that started it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil

from vllm_rollout.parts.shaping.rules.cost import StepTime
from vllm_rollout.process import server_environment

START_LIMIT_S = 600.0
KILL_S = 10.0
PR_SET_PDEATHSIG = 1


class EngineError(RuntimeError):
    """An engine did not start, ended, or could not do a job. The message has the engine's error."""


@dataclass(frozen=True)
class Settings:
    """Settings of one engine."""

    kind: Literal["rollout", "stock", "drafts"] = "rollout"
    model: Literal["tiny", "8b"] = "tiny"
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of vLLM's EngineArgs, beyond those that every engine here gets."""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """One request. It is tagged if it belongs to a group."""

    prompt: list[int]
    max_tokens: int
    seed: int | None = None
    temperature: float = 1.0
    ends_at: int | None = None
    """Token with which it ends by itself. None: it ends at max_tokens."""
    group: str | None = None
    index: int = 0
    group_size: int = 1
    num_candidates: int = 1
    early_stop: bool = False
    detection_length: int | None = None
    logprobs: int | None = None


class Engine:
    """A child process that holds an engine. Its methods are jobs of `engine_child.Child`."""

    def __init__(self, settings: Settings, model: Path, log: int) -> None:
        """The engine starts beside this process. The first job, or `wait_until_ready`, waits for it."""
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_child, args=(theirs, settings, str(model), log, os.getpid()))
        self._process.start()
        theirs.close()
        self._is_ready = False

    def __enter__(self) -> Engine:
        self.wait_until_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def wait_until_ready(self, limit_s: float = START_LIMIT_S) -> None:
        """Raises: EngineError if the engine does not start in time."""
        if not self._is_ready:
            self._answer(limit_s)
            self._is_ready = True

    def stop(self) -> None:
        if self._process.pid is not None:
            kill_all(self._process.pid)
        self._process.join()
        self._connection.close()

    def run(self, requests: list[Wanted], *, watch_steps: bool = False) -> dict[str, Any]:
        """Run requests. `seconds`, and `candidates` in order, each with tokens and finish reason.

        A candidate that has them also has state, confidence and score (logit, and the three numbers of its trace).
        `watch_steps`: also `step_ms`, the milliseconds of each step.
        """
        return self._do("run", requests, watch_steps)

    def watch_scores(self) -> None:
        """Make candidates return the values that reports have of them, from now on. It takes time in every step."""
        self._do("watch_scores")

    def publish_head(self, detection_length: int) -> None:
        """Publish a head with made-up weights, the same in every engine; `engine_child.head_weights`."""
        self._do("publish_head", detection_length)

    def sleep_and_wake(self) -> None:
        self._do("sleep_and_wake")

    def train_beside(self, requests: list[Wanted], num_rows: int, budget_s: float) -> dict[str, Any]:
        """Run requests while a head learns from `num_rows` made-up rows, for `budget_s` after each step.

        Returns `step_ms` and `num_trained_steps`, too. A budget of 0 trains nothing.
        """
        return self._do("train_beside", requests, num_rows, budget_s)

    # Calls of `vllm_rollout.profiling`.
    def info(self) -> dict[str, Any]:
        return self._do("info")

    def warm_up(self) -> None:
        self.decode(batch_size=2, context_tokens=32, num_warmup=0, num_steps=2)

    def decode(self, **arguments: int) -> list[StepTime]:
        return self._do("decode", **arguments)

    def prefill(self, **arguments: int) -> list[StepTime]:
        return self._do("prefill", **arguments)

    # Groups that move; `moving_jobs.py` describes the answers.
    def begin(self, group: str, prompt: list[int], sampling: list[dict[str, Any]]) -> None:
        self._do("begin", group, prompt, sampling)

    def until(self, group: str, num_tokens: int) -> float:
        return self._do("until", group, num_tokens)

    def release(self, group: str) -> dict[str, Any]:
        return self._do("release", group)

    def adopt(self, group: str, parcel: bytes, with_kv: bool) -> dict[str, Any]:
        return self._do("adopt", group, parcel, with_kv)

    def confirm(self, group: str) -> None:
        self._do("confirm", group)

    def end(self, group: str) -> dict[str, list[int]]:
        return self._do("end", group)

    def _do(self, job: str, *arguments: Any, **named: Any) -> Any:
        self.wait_until_ready()
        with suppress(BrokenPipeError):
            self._connection.send((job, arguments, named))
        return self._answer(None)

    def _answer(self, limit_s: float | None) -> Any:
        try:
            if not self._connection.poll(limit_s):
                raise EngineError(f"the engine has not started within {limit_s:.0f} s")
            succeeded, answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            raise EngineError(f"the engine ended with exit status {self._process.exitcode}") from None
        if not succeeded:
            raise EngineError(answer)
        return answer


def _child(connection: Connection, settings: Settings, model: str, log: int, parent: int) -> None:
    become_child(parent, log)
    os.environ |= {**server_environment(model), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **settings.environment}
    from benchmarks.gpu_check.engine_child import Child

    serve(connection, lambda: Child(settings, model))


def serve(connection: Connection, make: Callable[[], Any]) -> None:
    """Make an object, and run jobs on it until the connection closes."""
    import traceback

    try:
        maker = make()
        connection.send((True, None))
        while True:
            job, arguments, named = connection.recv()
            connection.send((True, getattr(maker, job)(*arguments, **named)))
    except EOFError:
        pass
    except Exception:
        connection.send((False, traceback.format_exc()[-6000:]))
    os._exit(0)  # CUDA's and torch's own ends take seconds


def become_child(parent: int, log: int) -> None:
    """Make this process end with its parent, lead a process group of its own, and write its output into the log."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)
    os.setpgid(0, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides


def kill_all(pid: int) -> None:
    """Kill a process and all its descendants, whatever their groups: an engine core would keep its device's memory."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        processes = [process, *process.children(recursive=True)]
        for each in processes:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(processes[1:], KILL_S)

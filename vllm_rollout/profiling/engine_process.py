"""The measuring engine as a child process: commands on its standard input, answers on its standard output, a log file.

Invariant: the child is a process group of its own and is gone when the `with` block ends.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from vllm_rollout.parts.shaping.rules.cost import StepTime
from vllm_rollout.process import LOG_TAIL_LINES, ServerError, last_lines, last_message

STOP_TIMEOUT_S = 20.0
POLL_INTERVAL_S = 0.5

OnWait = Callable[[float, str], None]
"""Called with the seconds waited and the last line of the log."""


class EngineError(ServerError):
    """The engine did not start, or died. The message ends with the end of its log and what to do."""


class EngineProcess:
    """The engine with which a profile is measured."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        on_wait: OnWait = lambda seconds, line: None,
    ) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._log = log
        self._on_wait = on_wait
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> EngineProcess:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                start_new_session=True,  # Ctrl-C is for us, and we stop the engine
            )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        assert process is not None
        assert process.stdin is not None
        try:
            with suppress(BrokenPipeError):
                process.stdin.close()  # the engine ends with its input
            if kind is not None:
                process.send_signal(signal.SIGINT)  # now, not after the current point
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def info(self) -> dict[str, Any]:
        """Description of the engine: model, machine, versions, flags and capacities."""
        return self._call("info")

    def warm_up(self) -> None:
        self._call("warm_up")

    def decode(self, **arguments: int) -> list[StepTime]:
        """Measure decode steps of exactly `batch_size` candidates.

        Arguments: `batch_size`, `context_tokens`, `num_warmup`, `num_steps`.
        """
        return [StepTime(*step) for step in self._call("decode", **arguments)]

    def prefill(self, **arguments: int) -> list[StepTime]:
        """Measure steps that compute `chunk_tokens` prompt tokens beside one candidate that decodes.

        Arguments: `chunk_tokens`, `num_steps`.
        """
        return [StepTime(*step) for step in self._call("prefill", **arguments)]

    def _call(self, command: str, **arguments: Any) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([command, arguments]) + "\n")
        except BrokenPipeError:
            raise self._ended() from None
        waited = 0.0
        while True:
            try:
                answer = self._answers.get(timeout=POLL_INTERVAL_S)
            except queue.Empty:
                waited += POLL_INTERVAL_S
                self._on_wait(waited, last_message(last_lines(self._log, 50)))
                continue
            if not answer:
                raise self._ended()
            return json.loads(answer)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _ended(self) -> EngineError:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(3)
        tail = "\n".join(f"  | {line[:200]}" for line in last_lines(self._log, LOG_TAIL_LINES))
        return EngineError(
            f"the engine ended with exit status {self._process.poll()}. The end of its log ({self._log}):\n{tail}\n"
            "What to do: 'unrecognized arguments' means a flag behind -- that `vllm-rollout serve` does not have; "
            "'out of memory' or 'KV cache' means less memory than needed, so set VLLM_CPU_KVCACHE_SPACE=2 (GiB) or "
            f"--gpu-memory-utilization behind --. The command was:\n  {' '.join(self._command)}"
        )


def engine_command(model: str, tensor_parallel_size: int, flags: Sequence[str], *, logprobs: bool) -> list[str]:
    """Command line that starts the measuring engine."""
    command = [
        sys.executable,
        "-m",
        "vllm_rollout.parts.shaping.api.profiler",
        *([] if logprobs else ["--no-logprobs"]),
        model,
    ]
    return [*command, "--tensor-parallel-size", str(tensor_parallel_size), *flags]

"""A vLLM server as a child process: flags and environment for a small machine, start, log, counters, end.

Invariant: the server is a process group of its own and is gone when the `with` block ends.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType

import httpx

from vllm_rollout import on_cpu
from vllm_rollout.config import CPU_BLOCK_SIZE_TOKENS

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
"""Seconds for a server to stop by itself: it may be saving its learning state."""
FIRST_PORT, LAST_PORT = 20_000, 32_000
CHILDREN_GRACE_S = 3.0
"""Seconds for the server's own children to end after it, before they are killed."""
KILL_TIMEOUT_S = 1.0
"""Seconds to wait for a killed process. It may stay as a zombie if no process reaps orphans."""
POLL_INTERVAL_S = 0.5
LOG_TAIL_LINES = 25
MAX_MODEL_LEN_TOKENS = 2048
MAX_BATCHED_TOKENS = 16_384
"""Enough for every prompt in one step: a seeded prompt that is split over steps kills vLLM 0.32's CPU engine."""

GENERATION_TOKENS = "vllm:generation_tokens_total"
REQUESTS_RUNNING = "vllm:num_requests_running"


class ServerError(RuntimeError):
    """The server did not start, or died. The message ends with the end of its log and what to do."""


class ServerProcess:
    """A vLLM server in a process group of its own, on 127.0.0.1, with its log in a file."""

    def __init__(self, command: Sequence[str], port: int, environment: Mapping[str, str], log: Path) -> None:
        self.command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us, and we stop the server
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def check_alive(self) -> None:
        """Raises: ServerError if the process has ended."""
        assert self._process is not None
        if (status := self._process.poll()) is not None:
            raise ServerError(self._report(f"the server ended with exit status {status}"))

    def wait_until_healthy(self, on_wait: Callable[[float, str], None], timeout_s: float = START_TIMEOUT_S) -> float:
        """Seconds until /health answered 200. `on_wait(seconds, last line of the log)` is called meanwhile.

        Raises: ServerError if the server ends or needs more than `timeout_s`.
        """
        started = time.monotonic()
        with httpx.Client(base_url=self.url, timeout=5, trust_env=False) as client:
            while True:
                self.check_alive()
                with suppress(httpx.TransportError):
                    if client.get("/health").status_code == 200:
                        return time.monotonic() - started
                waited = time.monotonic() - started
                if waited > timeout_s:
                    raise ServerError(self._report(f"the server did not answer within {timeout_s:.0f} s"))
                on_wait(waited, last_message(self.log_tail(50)))
                time.sleep(POLL_INTERVAL_S)

    def lost(self, error: Exception) -> ServerError:
        """Error for a broken connection, with the end of the server's log."""
        with suppress(subprocess.TimeoutExpired):
            assert self._process is not None
            self._process.wait(3)
        return ServerError(self._report(f"the connection to the server broke ({type(error).__name__}: {error})"))

    def log_tail(self, num_lines: int) -> list[str]:
        return last_lines(self.log, num_lines)

    def stop(self) -> None:
        """End the server and every process of its group. Returns when they are gone."""
        if self._process is None:
            return
        process, self._process = self._process, None
        try:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)
            _wait_for_group(process.pid, CHILDREN_GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _wait_for_group(process.pid, KILL_TIMEOUT_S)

    def _report(self, what: str) -> str:
        tail = "\n".join(f"  | {line[:200]}" for line in self.log_tail(LOG_TAIL_LINES))
        return (
            f"{what}. The end of its log ({self.log}):\n{tail}\n"
            "What to do: 'address already in use' means another program took the port, so run this again; 'out of "
            "memory' or 'KV cache' means less memory than needed, so set VLLM_CPU_KVCACHE_SPACE=2 (GiB) or choose "
            f"fewer prompts or candidates. The command was:\n  {' '.join(self.command)}"
        )


def _wait_for_group(group: int, timeout_s: float) -> None:
    """Wait until the process group has no member, at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.02)


@contextmanager
def log_folder() -> Iterator[Path]:
    """A temporary folder. It stays if a ServerError was raised, which names a log in it."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-rollout-"))
    try:
        yield folder
    except ServerError:
        raise
    except BaseException:
        shutil.rmtree(folder)
        raise
    else:
        shutil.rmtree(folder)


def free_port() -> int:
    """A port that is free now. It lies below the ports of outgoing connections, which would take it meanwhile."""
    for port in random.sample(range(FIRST_PORT, LAST_PORT), LAST_PORT - FIRST_PORT):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port from {FIRST_PORT} to {LAST_PORT} is free")


def exit_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that `with` blocks stop their servers."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def runs_on_cpu() -> bool:
    """True if the installed vLLM is the CPU build."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def server_environment(model: str) -> dict[str, str]:
    """Our environment with additions for a server of a small model. Variables that the user has set stay.

    Raises: RuntimeError if a CPU has too little memory.
    """
    wanted = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if runs_on_cpu() and on_cpu.KV_SPACE not in os.environ:
        wanted[on_cpu.KV_SPACE] = str(on_cpu.kv_cache_gib(on_cpu.available_memory()))
    if runs_on_cpu() and on_cpu.compiler() is None:
        wanted |= dict([on_cpu.COMPILE_NOTHING])
    if Path(model).is_dir():
        wanted |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {**wanted, **os.environ}


def server_flags(max_candidates: int) -> list[str]:
    """Flags for `max_candidates` running at once, equal for stock vLLM and for us."""
    flags = ["--max-num-seqs", str(max_candidates), "--max-model-len", str(MAX_MODEL_LEN_TOKENS)]
    flags += ["--max-num-batched-tokens", str(MAX_BATCHED_TOKENS), "--disable-uvicorn-access-log"]
    if runs_on_cpu():
        flags += ["--enforce-eager", "--dtype", on_cpu.this_cpu().dtype, "--block-size", str(CPU_BLOCK_SIZE_TOKENS)]
    return flags


def last_lines(log: Path, num_lines: int) -> list[str]:
    """The last lines of a log that may be long and still grow."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 64 * 1024))
        return file.read().decode(errors="replace").splitlines()[-num_lines:]


def last_message(lines: Sequence[str]) -> str:
    """The newest line of a vLLM log without its prefix."""
    for line in reversed(lines):
        message = re.sub(r"^(\(.*?\)\s*)?(\w+ \d\d-\d\d \d\d:\d\d:\d\d \[.*?\]\s*)?", "", line).strip()
        if re.search(r"\w{3}", message) and not message.startswith("Route:"):
            return message
    return "the process starts"


def counter(metrics: str, name: str) -> float:
    """Value of a counter or gauge in Prometheus text, summed over its labels. 0 if it is absent."""
    values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)", metrics, re.MULTILINE)
    return sum(map(float, values))

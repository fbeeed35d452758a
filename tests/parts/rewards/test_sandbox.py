"""Programs that attack what runs them. None reaches anything of ours, and none is left."""

import asyncio
import errno
import os
import re
import shutil
import signal
import socket
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import eventually, wait_until
from vllm_rollout.parts.rewards.grading import Grader, Trajectory, pool, seccomp
from vllm_rollout.parts.rewards.grading import sandbox as sandboxes
from vllm_rollout.parts.rewards.grading.code import program_of
from vllm_rollout.parts.rewards.grading.program_tests import same_value
from vllm_rollout.parts.rewards.grading.sandbox import SandboxBounds, SandboxError, choose_sandbox
from vllm_rollout.parts.rewards.grading.seccomp import ALLOW, INSTRUCTION, RETURN, filter_program
from vllm_rollout.parts.rewards.rules.time_limits import LimitTerms

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
    """Grades of attacks, then grades of answers. `data`: of all, or a list with that of each."""

    async def all_of_them():
        async with Grader({"code": "code"}, num_processes=2, limits=LIMITS) as grader:
            limits = [ATTACK_S] * len(attacks) + [None] * len(answers)
            each_data = data if isinstance(data, list) else [data] * len(limits)
            jobs = (
                grader.grade("code", Trajectory("double it", answer, its), timeout_s=limit, **options)
                for answer, its, limit in zip([*attacks, *answers], each_data, limits, strict=True)
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


MEANINGS = [
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
]
"""A program, a test and the reward."""


def test_tests_mean_what_they_mean_in_python():
    grades = graded(
        *(fenced(program) for program, _, _ in MEANINGS), data=[{"tests": [test]} for _, test, _ in MEANINGS]
    )
    found = [(program, test, said(grade)) for (program, test, _), grade in zip(MEANINGS, grades, strict=True)]
    assert found == [(program, test, ("ok", reward)) for program, test, reward in MEANINGS]


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
    "shared memory that stays": "mmap.mmap(-1, 4096)",
    "shared memory by a device": "mmap.mmap(os.open('/dev/zero', os.O_RDWR), 4096)",
    "huge pages": "mmap.mmap(-1, 1 << 21, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)",
    "pages in pipes": "os.splice(os.open('/dev/full', os.O_RDONLY), os.pipe()[1], 1)",
    "a table of futexes": "zero(libc.prctl(78, 1, 16, 0, 0))",
    "semaphores": "libc.semget(0, 100, 0o1600) == -1 and 1 / 0",
    "message queues": "libc.msgget(0, 0o1600) == -1 and 1 / 0",
    "named message queues": "libc.mq_open(b'/x', os.O_CREAT | os.O_RDWR, 0o600, None) == -1 and 1 / 0",
    "watches of descriptors": "select.epoll()",
    "watches of files": "libc.inotify_init1(0) == -1 and 1 / 0",
    "rings of requests": "libc.syscall(425, 1, bytes(120)) == -1 and 1 / 0",
    "policies of memory": "zero(libc.syscall(nr(238, 237), 0, None, 0))",
    "rules for itself": "libc.syscall(444, bytes([1] + 15 * [0]), 16, 0) == -1 and 1 / 0",
    "attributes of files": "os.setxattr('/tmp', 'user.x', b'1')",
    "many timers": "[zero(libc.timer_create(0, None, bytes(8))) for _ in range(1000)]",
    "many files": "[os.symlink('x', f'/tmp/{{each}}') for each in range(20_000)]",
    "many folders": "[os.mkdir(f'/dev/shm/{{each}}') for each in range(20_000)]",
    "terminals": "os.openpty()",
    "calls that nobody has looked at": "libc.syscall(470) == -1 and ctypes.get_errno() == 38 and 1 / 0",
    "the hypervisor": "socket.socket(40)",
    "the kernel's sockets": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "memory of all connections": "socket.socket()",
    "much of /dev/shm": "open('/dev/shm/x', 'wb').write(bytes(65 << 20))",
    "many open files": "[open('/dev/null') for _ in range(128)]",
    "another user": "os.setuid(0) or os.getuid() == 0 or 1 / 0",
}
"""Each raises, unless it reaches what it names."""
REACH = """
import ctypes, mmap, os, select, socket, sys
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


TABLES = """
import ctypes, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
for each in range(60_000): ctypes.c_char.from_address(libc.mmap((1 << 44) + (each << 30), 4096, 3, 0x22, -1, 0)).value
time.sleep(60)
"""
"""Pages of zeros, each with two of tables for itself."""
PIECES = """
import ctypes, mmap, os, time
all_of_it = mmap.mmap(-1, 60_000 * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(all_of_it))
for each in range(0, 60_000, 2): ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + 4096 * each), 4096, 1)
for _ in range(9): os.fork() or time.sleep(60)
time.sleep(60)
"""
"""A program that makes many mappings in many processes."""
UNACCEPTED = """
import socket, time
with socket.socket(socket.AF_UNIX) as server:
    server.bind("/tmp/x")
    server.listen(4096)
    for _ in range(1000):
        with socket.socket(socket.AF_UNIX) as client: client.connect("/tmp/x")
    time.sleep(60)
"""
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
        ({"memory_bytes": 1 << 28}, TABLES, "memory"),
        ({}, PIECES, "memory"),
        ({}, UNACCEPTED, "memory"),
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


def sandboxes_of():
    """The process ids of what has started a sandbox."""
    found = [each.info for each in psutil.process_iter(["name", "pid", "ppid"]) if each.info["name"] == "bwrap"]
    return {each["ppid"] for each in found} - {each["pid"] for each in found}


def test_what_was_ended_for_a_limit_says_so_however_slowly_it_dies(monkeypatch):
    monkeypatch.setattr(sandboxes, "KILL_S", 0.0)  # nothing dies as fast

    async def run(program, **bounds):
        sandbox = sandboxes.Sandbox(sandboxes.Bubblewrap(), SandboxBounds(**bounds))
        said = await sandbox.run({"main.py": program}, limit_s=5 if bounds else 0.5)
        await asyncio.to_thread(wait_until, lambda: os.getpid() not in sandboxes_of())
        await asyncio.sleep(0.1)  # the loop sees that its pipes have ended
        return said.end

    assert asyncio.run(run("import time; time.sleep(60)")) == "timeout"
    assert asyncio.run(run("while True: print('x' * 1000)", output_bytes=1000)) == "output"


WATCHED = "import time\ntime.sleep(3)\n" + RIGHT


def watchers(done):
    """The processes that watch a program, but for those that have been ended."""
    ours = {each.pid for each in psutil.Process().children(recursive=True)}
    return sorted(sandboxes_of() & ours - {*done})


async def ended(number, kill):
    """Ends that many watchers, one after the other."""
    done = []
    while len(done) < number:
        for pid in watchers(done)[:1]:
            os.kill(pid, kill)
            done.append(pid)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("deaths", "kill", "status", "reward", "reason"),
    [
        (1, signal.SIGKILL, "ok", 1, None),
        (2, signal.SIGKILL, "ok", 0, "a test failed: the process that watched it ended, twice"),
        (1, signal.SIGSTOP, "timeout", 0, "a test took more than 5 s"),
    ],
)
def test_a_program_has_a_reward_whatever_becomes_of_what_watches_it(deaths, kill, status, reward, reason, monkeypatch):
    for name, value in (("MAX_STRETCH", 1.0), ("LOAD_S", 0.0), ("KILL_S", 1.0)):
        if kill == signal.SIGSTOP:
            monkeypatch.setattr(pool, name, value)

    async def grade():
        async with Grader({"code": "code"}, num_processes=1, limits=LimitTerms(shortest_s=5, longest_s=5)) as grader:
            killing = asyncio.create_task(asyncio.wait_for(ended(deaths, kill), 60))
            data = {"tests": ["assert f(3) == 6"]}
            grade = await grader.grade("code", Trajectory("", fenced(WATCHED), data))
            await killing
            return grade

    grade = asyncio.run(grade())
    assert (grade.status, grade.reward, grade.reason) == (status, reward, reason)


def test_a_program_that_cannot_be_started_has_no_reward_and_its_process_goes_on():
    async def both():
        async with Grader({"code": "code"}, num_processes=1, limits=LIMITS) as grader:
            first = await grader.grade("code", Trajectory("", fenced(RIGHT), TESTS))
            (home,) = Path(grader._processes._home.name).iterdir()
            shutil.rmtree(home)
            home.touch()
            second = await grader.grade("code", Trajectory("", fenced(RIGHT), TESTS))
            home.unlink()
            return first, second, await grader.grade("code", Trajectory("", fenced(RIGHT), TESTS))

    first, second, third = asyncio.run(both())
    assert (said(first), said(third)) == (("ok", 1), ("ok", 1))
    assert said(second) == ("error", None)
    assert "the program could not be run: [Errno 17]" in second.reason


UNREADABLE = [
    "9" * 400 + "+1j",
    "-" * 3000 + "1",
    "(" * 3000,
    "\0",
    "1e999-1e999j",
    "{[]: 1}",
    "b'x' + b'y'",
    "'\\ud800'",
]
"""Outputs of a program in place of a value. Python's parser reads each of them, and some raise."""


def test_what_cannot_be_read_is_not_equal():
    assert [same_value(f"[{text}]", [6]) for text in UNREADABLE] == [False] * len(UNREADABLE)
    lies = [f"import os\nos.write(1, {text!r}.encode()); os._exit(0)" for text in (f"[{UNREADABLE[0]}]",)]
    grades = graded(*map(fenced, [*lies, "def f(x): return '\ud800'"]), data={"tests": ["assert f(3) == 6"]})
    assert [said(grade) for grade in grades] == [("ok", 0)] * 2


def test_a_long_line_behind_backticks_is_no_block_and_takes_no_time():
    """A search whose steps are the square of its 200,000 characters would not come back before the test's end."""
    text = "```" + "a" * 200_000
    assert program_of(text) == text


def test_nothing_is_left_of_programs_that_have_ended():
    async def left():
        async with Grader({"code": "code"}, num_processes=1, limits=LIMITS) as grader:
            answers = map(fenced, [RIGHT, "import os\nos.fork()", "1 / 0", RIGHT, RIGHT])
            await asyncio.gather(*(grader.grade("code", Trajectory("", answer, TESTS)) for answer in answers))
            await grader.grade("code", Trajectory("", fenced(RIGHT), TESTS))
            await eventually(lambda: statuses().count(psutil.STATUS_ZOMBIE) <= 1, every_s=0.01)  # one may be on its way

    def statuses():
        return [each.status() for each in psutil.Process().children(recursive=True)]

    asyncio.run(left())


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("from fractions import Fraction\ndef f(): return Fraction(1, 2)", "assert f() == 0.5"),
        ("from decimal import Decimal\ndef f(): return [Decimal(3)]", "assert f() == [3]"),
        ("def f(): return {1: 2}.keys()", "assert f() == {1}"),
        ("import atexit\natexit.register(print, 'bye')\ndef f(): return 1", "assert f() == 1"),
    ],
)
def test_values_that_python_calls_equal_to_a_literal_are_equal(program, test):
    (grade,) = graded(fenced(program), data={"tests": [test]})
    assert (grade.status, grade.reward) == ("ok", 1)


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
        ("--as=.*", "more than RLIMIT_AS"),
        ("--nproc=.*", "more than RLIMIT_NPROC"),
        ("--sigpending=.*", "more than RLIMIT_SIGPENDING"),
    ],
)
def test_a_sandbox_that_lacks_a_part_is_refused(part, reached, monkeypatch):
    whole = sandboxes.Bubblewrap.command

    def lacking(self, *given):
        return [each for each in whole(self, *given) if not re.fullmatch(part, each)]

    monkeypatch.setattr(sandboxes.Bubblewrap, "command", lacking)
    bounds = SandboxBounds(max_sockets=1 << 20)  # where the network is the machine's
    with pytest.raises(SandboxError, match=f"reaches .*{reached}"):
        asyncio.run(choose_sandbox(bounds))


def test_a_sandbox_whose_folders_take_any_number_of_files_is_refused(monkeypatch):
    mounter = sandboxes.mounter
    monkeypatch.setattr(sandboxes, "mounter", lambda folders, size, inodes: mounter(folders, size, 10 * inodes))
    with pytest.raises(SandboxError, match="reaches all inodes of /tmp, all inodes of /dev/shm"):
        asyncio.run(choose_sandbox())


def test_a_sandbox_without_its_filter_or_on_an_unknown_machine_is_refused(monkeypatch):
    monkeypatch.setattr(sandboxes, "filter_program", lambda: INSTRUCTION.pack(RETURN, 0, 0, ALLOW))
    with pytest.raises(SandboxError, match=r"reaches the hypervisor, memory that nobody counts, .*semget"):
        asyncio.run(choose_sandbox())
    with pytest.raises(ValueError, match="a sandbox needs a machine of x86_64 or aarch64, got riscv64"):
        filter_program("riscv64")


def verdict(machine, number, arguments=(), architecture=None):
    """Verdict of the filter on a call, by an interpreter of the filter's three kinds of instructions."""
    code = list(INSTRUCTION.iter_unpack(filter_program(machine)))
    words = {seccomp.NUMBER: number, seccomp.ARCHITECTURE: architecture or seccomp.MACHINES[machine]}
    words |= {seccomp.FIRST_ARGUMENT + 8 * position: each for position, each in enumerate([*arguments, *[0] * 6][:6])}
    tests = {seccomp.EQUAL: int.__eq__, seccomp.AT_LEAST: int.__ge__, seccomp.HAS_BITS: int.__and__}
    at = 0
    while True:
        kind, if_true, if_false, value = code[at]
        if kind == RETURN:
            return value
        at += 1
        if kind == seccomp.LOAD:
            held = words[value]
        else:
            at += if_true if tests[kind](held, value) else if_false


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_the_filter_says_what_its_tables_say_on_each_machine(machine):
    which = list(seccomp.MACHINES).index(machine)
    number = {name: each[which] for name, each in (seccomp.CALLS | seccomp.BY_ARGUMENT).items()}
    for name, (*_, error) in seccomp.CALLS.items():
        assert number[name] is None or verdict(machine, number[name]) == seccomp.ERROR | error, name
    assert verdict(machine, 63 if which else 0) == ALLOW  # read
    assert verdict(machine, 470) == verdict(machine, 0x40000000) == seccomp.ERROR | errno.ENOSYS
    assert verdict(machine, 0, architecture=0x40000003) == seccomp.KILL  # the calls of 32 bits
    for name, arguments, error in (
        ("clone", [0x10000011], errno.EPERM),
        ("clone", [0x3D0F00], None),  # a thread
        ("unshare", [0x20000], errno.EPERM),
        ("unshare", [0x400], None),
        ("mmap", [0, 1, 3, 0x21], errno.EPERM),
        ("mmap", [0, 1, 3, 0x22], None),
        ("mmap", [0, 1, 3, 0x01], None),
        ("mmap", [0, 1, 3, 0x40022], errno.EPERM),
        *(("fcntl", [3, command], 0) for command in (6, 7, 37, 38)),
        *(("fcntl", [3, command], None) for command in (1, 3, 5, 1030)),
        ("prctl", [22], errno.EINVAL),
        ("prctl", [78], errno.EINVAL),
        ("prctl", [15], None),
        ("socket", [1, 1], None),
        ("socket", [2, 1], errno.EPERM),
        ("socket", [10, 0x80802], None),
        ("socket", [10, 0x80001], errno.EPERM),
        ("socket", [16, 3], errno.EAFNOSUPPORT),
        ("socketpair", [40, 1], errno.EAFNOSUPPORT),
        ("setsockopt", [3, 1, 7], 0),
        ("setsockopt", [3, 1, 8], 0),
        ("setsockopt", [3, 1, 2], None),
        ("setsockopt", [3, 6, 7], None),
    ):
        wanted = ALLOW if error is None else seccomp.ERROR | error
        assert verdict(machine, number[name], arguments) == wanted, (name, arguments)
    numbers = sorted(each for each in number.values() if each is not None)
    assert all(one < other < seccomp.FIRST_UNKNOWN for one, other in pairwise(numbers))

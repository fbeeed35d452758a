"""Programs that attack what runs them. None reaches anything of ours, and none is left."""

import asyncio
import os
from pathlib import Path

import psutil
import pytest

from vllm_rollout.group.rewards.time_limits import LimitTerms
from vllm_rollout.rewards import Grader, Trajectory
from vllm_rollout.rewards import sandbox as sandboxes
from vllm_rollout.rewards.sandbox import SandboxBounds, SandboxError, choose_sandbox

RIGHT = "def f(x): return 2 * x"
TESTS = {"tests": ["assert f(3) == 6", "assert f(0) == 0"]}
LIMITS = LimitTerms(shortest_s=0.5, longest_s=3)

ATTACKS = {
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "eats": "held = []\nwhile True: held.append(bytearray(10 << 20))",
    "eats in children": (
        "import os, time\nfor _ in range(20):\n    os.fork() or (bytearray(300 << 20), time.sleep(60))\ntime.sleep(60)"
    ),
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
LEAVES = f"import subprocess\nsubprocess.Popen(['/bin/sleep', '98764'], start_new_session=True)\n{RIGHT}"


def fenced(program):
    return f"First a thought.\n```python\nprint('not this one')\n```\nSo:\n```python\n{program}\n```\nThat is it."


def graded(*answers, data=TESTS, **options):
    async def all_of_them():
        async with Grader({"code": "code"}, num_processes=2, limits=LIMITS) as grader:
            jobs = (grader.grade("code", Trajectory("double it", answer, data), **options) for answer in answers)
            return await asyncio.gather(*jobs)

    return asyncio.run(all_of_them())


def test_programs_that_attack_earn_nothing_and_change_nobody_elses_grade():
    *attacks, leaves, right = graded(*map(fenced, [*ATTACKS.values(), LEAVES, RIGHT]))
    said = {name: grade.reward for name, grade in zip(ATTACKS, attacks, strict=True)}
    assert said == dict.fromkeys(ATTACKS, 0)
    assert (leaves.reward, right.reward, right.parts) == (1, 1, {"passed": 1})
    left = [each for each in psutil.process_iter(["cmdline"]) if "98764" in (each.info["cmdline"] or [])]
    assert left == []


LOOKS = """
import os, socket, sys
found = [path for path in {paths} if os.path.exists(path)]
found += [name for name in os.environ if name == "OUR_SECRET"]
found += [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) > 100]
for place in (("127.0.0.1", {port}), ("1.1.1.1", 53)):
    try: socket.create_connection(place, 1); found.append(place)
    except OSError: pass
for path in ("/usr/x", "/program/x", "/x", "/etc/x"):
    try: open(path, "w"); found.append(path)
    except OSError: pass
print(found)
"""


def test_a_program_finds_no_file_variable_process_or_network_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("OUR_SECRET", "key")
    (tmp_path / "key").write_text("secret")
    paths = [str(tmp_path / "key"), "/etc/passwd", "/root", "/home", str(Path.cwd()), f"/proc/{os.getpid()}"]

    async def look():
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            sandbox = await choose_sandbox()
            return await sandbox.run({"main.py": LOOKS.format(paths=paths, port=port)})

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
        ({}, "print(input())", "exited"),
    ],
)
def test_a_run_says_how_it_ended(bounds, program, end):
    async def run():
        sandbox = await choose_sandbox(SandboxBounds(**bounds))
        return await sandbox.run({"main.py": program}, b"word", limit_s=3 if end != "memory" else 30)

    said = asyncio.run(run())
    assert said.end == end
    assert end != "exited" or (said.code, said.output) == (0, b"word\n")


def test_what_a_program_prints_is_compared_outside_of_it():
    data = {"tests": [{"input": "4\n", "output": "8"}, {"input": "5", "output": "10\n"}], "partial": True}
    right, half, none = graded(*map(fenced, ["print(2 * int(input()))", "print('8')", "print(1)"]), data=data)
    assert [grade.reward for grade in (right, half, none)] == [1, 0.5, 0]


def test_an_answer_without_a_program_earns_nothing_and_data_without_tests_is_an_error():
    (grade,) = graded("I do not know.")
    assert (grade.status, grade.reward) == ("ok", 0)
    for data in (None, {}, {"tests": []}, {"tests": "assert"}, {"tests": [{"input": 3}]}):
        (grade,) = graded(fenced(RIGHT), data=data)
        assert grade.status == "error"
        assert '"data": {"tests": [...]}' in grade.reason


def test_code_is_refused_where_no_sandbox_works(monkeypatch):
    monkeypatch.setattr(sandboxes.Bubblewrap, "command", lambda *_: ["/usr/bin/python3"])
    with pytest.raises(SandboxError, match=r"bubblewrap does not hold here: .*user namespaces"):
        graded(fenced(RIGHT))

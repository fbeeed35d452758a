"""Many trajectories at once, graded by functions that hang, die, leak and lie: each harms its own grade only."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from tests.support.waiting import eventually, wait_until
from vllm_rollout.parts.rewards.grading import Grader, GraderBusy, Trajectory
from vllm_rollout.parts.rewards.grading.grader import RewardLoad
from vllm_rollout.parts.rewards.grading.pool import ProcessBounds
from vllm_rollout.parts.rewards.grading.slots import Urgency
from vllm_rollout.parts.rewards.rules.time_limits import LimitTerms

SHORT = LimitTerms(shortest_s=0.5, longest_s=2)
ASKED = Trajectory("6 * 7?", "42", {"answer": "42"})


def right(text, data):
    return float(text == data["answer"])


def hangs(text):
    time.sleep(1000)


def shouts_and_wanders(text):
    print("x" * 1_000_000)
    os.chdir("/")
    return 1


def stays(text):
    """Report the process and the folder in which the function runs."""
    return {"score": os.getpid(), "at_home": os.getcwd() != "/"}


def raises(text):
    return {}["answer"]


def is_no_number(text):
    return float("nan")


def is_infinite(text):
    return float("inf")


def is_a_string(text):
    return "1.0"


def are_two(completions):
    return [1.0, 1.0]


def spins(text):
    while True:
        pass


def spins_without_letting_go(text):
    return len(re.findall("(a+)+$", "a" * 60 + "b"))


def hangs_with_signals_blocked(text):
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    hangs(text)


def dies(text):
    os._exit(0)


def exits(text):
    sys.exit(0)


def kills_its_group(text):
    os.killpg(0, signal.SIGKILL)


def closes_its_sockets(text):
    os.closerange(3, 1 << 16)  # a test process may have more than 256 files open
    return 1


def eats(text):
    return len(bytearray(1 << 36))


def shouts(text):
    for standard in (1, 2):
        for _ in range(1024):
            os.write(standard, bytes(1 << 20))
    return 1


def comes_back_twice(text):
    os.fork()
    return 1


def leaves_an_alarm(text):
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return 1


def leaves_a_child(text):
    subprocess.Popen(["sleep", "98765"], start_new_session=True)
    return 1


def leaves_a_child_and_dies(text):
    leaves_a_child(text)
    os._exit(0)


def dies_later(text):
    threading.Timer(1.0, os._exit, [1]).start()
    return 1


def removes_its_folder(text):
    os.rmdir(os.getcwd())
    return 1


BAD = {
    raises: "error: the reward function raised KeyError: 'answer'",
    is_no_number: "error: the reward function returned nan",
    is_infinite: "error: the reward function returned inf",
    is_a_string: "error: the reward function returned '1.0'",
    are_two: "error: the reward function raised ValueError: it returned 2 rewards for 1 completion",
    hangs: "timeout: it took more than 2 s",
    spins: "timeout: it took more than 2 s",
    spins_without_letting_go: "timeout: it took more than 2 s",
    hangs_with_signals_blocked: "timeout: it took more than 2 s",
    dies: "error: the process of the reward function ended",
    exits: "error: the process of the reward function ended",
    kills_its_group: "error: the process of the reward function ended",
    closes_its_sockets: "error: the process of the reward function ended",
    eats: "error: the reward function used up its memory",
    shouts: "ok",
    shouts_and_wanders: "ok",
    comes_back_twice: "ok",
    leaves_an_alarm: "ok",
    leaves_a_child: "ok",
    leaves_a_child_and_dies: "error: the process of the reward function ended",
    removes_its_folder: "ok",
}


def processes_with(argument):
    return [each for each in psutil.process_iter(["cmdline"]) if argument in (each.info["cmdline"] or [])]


def grades_of(rewards, *jobs, num_processes=1, limits=SHORT, **options):
    """One grade per (name, trajectory), all asked for at once."""

    async def all_of_them():
        async with Grader(rewards, num_processes=num_processes, limits=limits, **options) as grader:
            return await asyncio.gather(*(grader.grade(name, trajectory) for name, trajectory in jobs))

    return asyncio.run(all_of_them())


def said(grade):
    return f"{grade.status}: {grade.reason}" if grade.reason else grade.status


def test_bad_functions_harm_their_own_grades_only():
    """Each is followed by an innocent one, in the same process where that still lives."""
    rewards = {f.__name__: f for f in (right, *BAD)}
    jobs = [job for f in BAD for job in ((f.__name__, ASKED), ("right", ASKED))]
    grades = grades_of(rewards, *jobs, num_processes=2)
    for function, grade in zip(BAD, grades[::2], strict=True):
        assert said(grade).startswith(BAD[function]), function
        assert grade.reward == {"ok": 1, "timeout": 0, "error": None}[grade.status]
    assert [said(grade) for grade in grades[1::2]] == ["ok"] * len(BAD)
    assert {grade.reward for grade in grades[1::2]} == {1}
    wait_until(lambda: not processes_with("98765"))


def test_a_process_that_ends_between_two_trajectories_costs_the_next_one_nothing():
    async def both():
        async with Grader({"dies_later": dies_later, "right": right}, num_processes=1, limits=SHORT) as grader:
            first = await grader.grade("dies_later", ASKED)
            await eventually(lambda: grader._processes._idle[-1]._process.returncode is not None, every_s=0.01)
            return [said(first), said(await grader.grade("right", ASKED))]

    assert asyncio.run(both()) == ["ok", "ok"]


KEPT: list[asyncio.AbstractEventLoop] = []
LEFT: list[asyncio.Task[None]] = []


async def keeps_its_loop(text):
    """As a client does that a module keeps: what it opened belongs to the loop of the first trajectory."""
    KEPT.append(asyncio.get_running_loop())
    LEFT.append(asyncio.create_task(asyncio.sleep(1000)))
    return float(not KEPT[0].is_closed() and len(asyncio.all_tasks()) == 2)


def test_an_async_function_finds_the_loop_of_the_trajectory_before_and_none_of_its_tasks():
    grades = grades_of({"keeps_its_loop": keeps_its_loop}, *[("keeps_its_loop", ASKED)] * 3)
    assert [(said(grade), grade.reward) for grade in grades] == [("ok", 1)] * 3


def test_integers_of_any_size_are_data():
    assert [said(g) for g in grades_of({"exact": "exact"}, ("exact", Trajectory("", f"{2**70}", 2**70)))] == ["ok"]


SERVER_ANSWERS = {
    "/right": (200, b'{"reward": 1}', "ok"),
    "/fails": (500, b"no", "error: .* it answered 500"),
    "/garbage": (200, b"<html>", "error: the reward server answered no JSON"),
    "/another": (200, b'{"id": "1", "reward": 1}', "error: the reward server answered for another trajectory"),
    "/slow": (200, None, "error: .* it did not answer within 2 s"),
}


class Answers(BaseHTTPRequestHandler):
    def do_POST(self):
        status, body, _ = SERVER_ANSWERS[self.path]
        self.rfile.read(int(self.headers["Content-Length"]))
        if body is None:
            time.sleep(3)
            return
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_reward_servers_that_fail_harm_their_own_grades_only():
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            rewards = {path: f"http://127.0.0.1:{server.server_port}{path}" for path in SERVER_ANSWERS}
            jobs = [(path, ASKED) for path in SERVER_ANSWERS]
            large = ("/right", Trajectory("", "42", "x" * (10 << 20)))
            *jobs, slow = jobs
            *grades, of_large = grades_of(
                rewards | {"exact": "exact"}, *jobs, large, limits=LimitTerms(shortest_s=60, longest_s=60)
            )
            grades += grades_of(rewards, slow)
        finally:
            server.shutdown()
    for (path, (*_, wanted)), grade in zip(SERVER_ANSWERS.items(), grades, strict=True):
        assert re.match(wanted, said(grade)), path
    assert said(of_large) == "ok"


def test_data_of_10_mib_is_graded_and_deep_data_is_an_error():
    large = "x" * (10 << 20)
    deep = []
    for _ in range(100_000):
        deep = [deep]
    grades = grades_of(
        {"exact": "exact"},
        ("exact", Trajectory("", large, large)),
        ("exact", Trajectory("", "42", deep)),
        ("exact", ASKED),
    )
    assert [grade.status for grade in grades] == ["ok", "error", "ok"]
    assert [grade.reward for grade in grades] == [1, None, 1]


SERVES = """
import asyncio, subprocess, sys, time
from vllm_rollout.parts.rewards.grading import Grader, Trajectory
def leaves(text):
    subprocess.Popen(["sleep", "98763"], start_new_session=True)
    time.sleep(60)
async def main():
    program = "import subprocess as s, time\\ns.Popen(['/bin/sleep', '98763'], start_new_session=True)\\ntime.sleep(60)"
    async with Grader({"leaves": leaves, "code": "code"}, num_processes=2) as grader:
        code = Trajectory("", f"```python\\n{program}\\n```", {"tests": ["pass"]})
        await asyncio.gather(grader.grade("leaves", Trajectory("", "")), grader.grade("code", code))
asyncio.run(main())
"""


def test_nothing_is_left_of_a_server_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", SERVES]) as server:
        try:
            wait_until(lambda: len(processes_with("98763")) == 2)
        finally:
            server.kill()
    wait_until(lambda: not processes_with("98763"))


def test_a_process_is_used_again_from_its_own_folder_until_it_has_done_enough():
    jobs = [("wanders", ASKED), *[("stays", ASKED)] * 4]
    rewards = {"wanders": shouts_and_wanders, "stays": stays}
    _, *stayed = grades_of(rewards, *jobs, bounds=ProcessBounds(max_jobs=3))
    assert all(grade.parts == {"at_home": 1} for grade in stayed)
    pids = [grade.reward for grade in stayed]
    assert pids[0] == pids[1] != pids[2] == pids[3]


def test_a_limit_is_learned_for_each_test_case():
    def takes(text, data):
        time.sleep(float(text))
        return 1

    async def limits():
        async with Grader({"takes": takes}, num_processes=1, limits=LimitTerms(1.5, 0.2, 20)) as grader:
            for text in ("0.6", "30"):
                grade = await grader.grade("takes", Trajectory("prompt", text))
                yield grade
            yield await grader.grade("takes", Trajectory("another", "1.2"))

    async def gathered():
        return [grade async for grade in limits()]

    known, cut, other = asyncio.run(gathered())
    assert (known.status, cut.status, other.status) == ("ok", "timeout", "ok")
    assert cut.seconds < 20


def shaped(text):
    """A share for the form, which a wrong answer gets too, at once."""
    if "right" in text:
        time.sleep(0.2)
    return 1.0 if "right" in text else 0.1


def test_limits_are_learned_from_right_answers_only():
    async def learned():
        async with Grader({"shaped": shaped}, num_processes=1) as grader:
            limits = []
            for text, threshold in (("wrong", 0.5), ("right", 0.5), ("wrong", 0.05)):
                grade = await grader.grade("shaped", Trajectory(f"{text} {threshold}", text), threshold=threshold)
                assert grade.status == "ok"
                limits.append(len(grader.limits._anchors))
            return limits

    assert asyncio.run(learned()) == [0, 1, 2]


def test_what_is_asked_of_a_grader_that_ends_is_an_error():
    async def leave():
        async with Grader({"hangs": hangs}, num_processes=1) as grader:
            asked = [asyncio.create_task(grader.grade("hangs", ASKED)) for _ in range(2)]
            await eventually(lambda: grader._processes._in_use, every_s=0.01)
        return await asyncio.gather(*asked)

    runs, waits = asyncio.run(leave())
    assert said(runs).startswith("error: the process of the reward function ended")
    assert said(waits) == "error: the trajectory cannot be given to what grades it: its grader has ended"


async def noted(order, grader, name, urgency):
    """Grade, and append the name to `order` at the end."""
    await grader.grade("right", Trajectory(name, "42", {"answer": "42"}), urgency=urgency)
    order.append(name)


def test_who_is_urgent_is_graded_first_and_who_leaves_makes_room():
    order = []

    async def race():
        async with Grader({"right": right, "hangs": hangs}, num_processes=1, max_waiting=3) as grader:
            hanging = asyncio.create_task(grader.grade("hangs", ASKED))
            await asyncio.sleep(0)
            waiting = [
                asyncio.create_task(noted(order, grader, name, at)) for at, name in enumerate(("low", "mid", "high"))
            ]
            await asyncio.sleep(0)
            with pytest.raises(GraderBusy, match="3 trajectories wait"):
                await grader.grade("right", ASKED)
            waiting[1].cancel()
            hanging.cancel()
            with suppress(asyncio.CancelledError):
                await hanging
            await asyncio.wait(waiting)
            return await grader.grade("right", ASKED)

    assert asyncio.run(race()).status == "ok"
    assert order == ["high", "low"]


def test_who_is_hastened_passes_those_before_it_and_who_waits_is_counted():
    order = []

    async def race():
        async with Grader({"right": right}, num_processes=1) as grader:
            group, other = Urgency(), Urgency(1)
            waiting = [("runs", 0), ("a", group), ("plain", 0.5), ("other", other), ("b", group)]
            asked = [asyncio.create_task(noted(order, grader, name, urgency)) for name, urgency in waiting]
            await asyncio.sleep(0)
            assert grader.loads == {"right": RewardLoad(waiting=4, running=1)}
            group.hasten(2)
            group.hasten(0)
            await asyncio.gather(*asked)
            other.hasten(3)
            assert grader.loads == {"right": RewardLoad(waiting=0, running=0)}

    asyncio.run(race())
    assert order == ["runs", "a", "b", "other", "plain"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("no.such.module:f", "no.such.module"),
        ("json:no_such", "no_such"),
        ("ends_at_import:f", "the process of the reward function ended"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_refused_at_start(source, said, tmp_path, monkeypatch):
    (tmp_path / "ends_at_import.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)

    async def check():
        async with Grader({"exact": "exact", "mine": source}) as grader:
            await grader.check()

    with pytest.raises(ValueError, match=f"the reward 'mine' does not work: .*{said}.* Name a function"):
        asyncio.run(check())


def test_rewards_that_can_be_loaded_pass_the_check():
    async def check():
        async with Grader({"exact": "exact", "math": "math", "mine": right, "server": "http://127.0.0.1:1"}) as grader:
            await grader.check()
            return grader.sandbox

    assert asyncio.run(check()) is None


def test_names_and_sources_that_nobody_knows_are_refused():
    with pytest.raises(ValueError, match="the reward 'mine' must be exact, regex, math, code, package"):
        Grader({"mine": "sum"})
    with pytest.raises(ValueError, match="reward must be one of exact, got 'other'"):
        grades_of({"exact": "exact"}, ("other", ASKED))


def test_data_that_is_too_large_to_send_is_an_error_of_that_trajectory(monkeypatch):
    monkeypatch.setattr("vllm_rollout.parts.rewards.grading.frames.MAX_FRAME_BYTES", 1 << 20)
    large, fine = grades_of({"exact": "exact"}, ("exact", Trajectory("", "x" * (2 << 20), "x")), ("exact", ASKED))
    assert (large.status, fine.status) == ("error", "ok")
    assert "may have 1 MiB" in large.reason


KEPT = []


def counts_on_a_pool(text):
    if not KEPT:
        KEPT.append(ProcessPoolExecutor(1))
    return KEPT[0].submit(float, text).result()


def test_a_function_that_keeps_processes_never_meets_those_that_were_ended():
    async def three():
        async with Grader({"pool": counts_on_a_pool}, num_processes=1) as grader:
            return [await grader.grade("pool", Trajectory("", "1")) for _ in range(3)]

    assert [(grade.status, grade.reward) for grade in asyncio.run(three())] == [("ok", 1.0)] * 3

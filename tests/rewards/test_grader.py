"""Many trajectories at once, graded by functions that hang, die, leak and lie: each harms its own grade only."""

import asyncio
import os
import subprocess
import time
from contextlib import suppress

import psutil
import pytest

from vllm_rollout.group.rewards.time_limits import LimitTerms
from vllm_rollout.rewards import Grader, GraderBusy, Trajectory
from vllm_rollout.rewards.pool import ProcessBounds

SHORT = LimitTerms(shortest_s=0.5, longest_s=2)
ASKED = Trajectory("6 * 7?", "42", {"answer": "42"})


def right(text, data):
    return float(text == data["answer"])


def hangs(text):
    while True:
        time.sleep(1)


def dies(text):
    os._exit(0)


def eats(text):
    return len(bytearray(1 << 36))


def shouts_and_wanders(text):
    print("x" * 1_000_000)
    os.chdir("/")
    return 1


def stays(text):
    """Where it is asked: its folder, and its process."""
    return {"score": os.getpid(), "at_home": os.getcwd() != "/"}


def leaves_a_child(text):
    subprocess.Popen(["sleep", "98765"], start_new_session=True)
    return 1


def grades_of(rewards, *jobs, num_processes=1, limits=SHORT, **options):
    """One grade per (name, trajectory), all asked for at once."""

    async def all_of_them():
        async with Grader(rewards, num_processes=num_processes, limits=limits, **options) as grader:
            return await asyncio.gather(*(grader.grade(name, trajectory) for name, trajectory in jobs))

    return asyncio.run(all_of_them())


def test_bad_functions_harm_their_own_grades_only():
    rewards = {f.__name__: f for f in (right, hangs, dies, eats, shouts_and_wanders, leaves_a_child)}
    rewards |= {"exact": "exact", "nowhere": "no.such.module:f"}
    grades = grades_of(rewards, *((name, ASKED) for name in rewards), *[("right", ASKED)] * 3, num_processes=2)
    said = dict(zip(rewards, grades, strict=False))
    assert {name: grade.status for name, grade in said.items() if grade.status != "ok"} == {
        "hangs": "timeout",
        "dies": "error",
        "eats": "error",
        "nowhere": "error",
    }
    assert (said["hangs"].reward, said["dies"].reward) == (0, None)
    assert "memory" in said["eats"].reason
    assert "no.such.module" in said["nowhere"].reason
    assert [grade.reward for grade in grades[-3:]] == [1, 1, 1]
    assert not [each for each in psutil.process_iter(["cmdline"]) if "98765" in (each.info["cmdline"] or [])]


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


def test_who_is_urgent_is_graded_first_and_who_leaves_makes_room():
    order = []

    async def watch(grader, name, urgency):
        await grader.grade("right", Trajectory(name, "42", {"answer": "42"}), urgency=urgency)
        order.append(name)

    async def race():
        async with Grader({"right": right, "hangs": hangs}, num_processes=1, max_waiting=3) as grader:
            hanging = asyncio.create_task(grader.grade("hangs", ASKED))
            await asyncio.sleep(0)
            waiting = [asyncio.create_task(watch(grader, name, at)) for at, name in enumerate(("low", "mid", "high"))]
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


def test_names_and_sources_that_nobody_knows_are_refused():
    with pytest.raises(ValueError, match="the reward 'mine' must be exact, regex, math, code, package"):
        Grader({"mine": "sum"})
    with pytest.raises(ValueError, match="reward must be one of exact, got 'other'"):
        grades_of({"exact": "exact"}, ("other", ASKED))


def test_data_that_is_too_large_to_send_is_an_error_of_that_trajectory(monkeypatch):
    monkeypatch.setattr("vllm_rollout.rewards.frames.MAX_FRAME_BYTES", 1 << 20)
    large, fine = grades_of({"exact": "exact"}, ("exact", Trajectory("", "x" * (2 << 20), "x")), ("exact", ASKED))
    assert (large.status, fine.status) == ("error", "ok")
    assert "may have 1 MiB" in large.reason

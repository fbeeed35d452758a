"""Learned time limits where cores are free and where they are busy: which clock ends correct runs falsely?

Correct runs of known lengths and some that hang are graded by real processes within the limits that they teach, three
times: limits by wall time, by CPU time, and by wall time without waiting for a core, which is what the graders use. All
times are a tenth of RollPacker's (4.3): runs take about 0.1 s, limits lie between 0.2 and 3 s. As many processes grade
as there are cores. Busy: as many others spin beside them. Bursts: three times as many do, every other second, so that a
limit may be learned while cores are free and met while they are not.

The rule itself ends correct runs where runs of one test case differ much. What it would end of the lengths as they are
drawn, on a machine without any wait, is counted for several spreads and factors.

Run from the repository root: python -m benchmarks.rewards.limits
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import psutil
from rich.console import Console

from benchmarks.common import ROOT, arguments_of, median_of_known, publish, record_of_run
from benchmarks.tables import columns, number, percent
from vllm_rollout.group.rewards.time_limits import LimitTerms, TimeLimits
from vllm_rollout.rewards import Grade, Grader, Trajectory, pool
from vllm_rollout.rewards.clock import WorkClock
from vllm_rollout.rewards.values import case_of

TERMS = LimitTerms(factor=1.5, shortest_s=0.2, longest_s=3.0)
MEDIAN_S = 0.1
CASE_SIGMA = 0.5
"""Of the logarithms of the test cases' medians."""
RUNS_PER_CASE = 8
SPREADS = (0.05, 0.1, 0.2, 0.3, 0.5)
FACTORS = (1.5, 2.0, 3.0)
DRAWN_CASES = 20_000

BESIDE = {
    "free": (0, ""),
    "busy": (1, "while True: pass"),
    "bursts": (3, "import time\nwhile True:\n    if int(time.time()) % 2: time.sleep(0.01)"),
}
"""How many processes to a core run beside those that grade, and what."""

Hang = Literal["sleeps", "spins"]


class WallClock(WorkClock):
    @property
    def work_s(self) -> float:
        return self.wall_s


class CPUClock(WorkClock):
    def __init__(self, pid: int) -> None:
        self._at_start_s = cpu_s(pid)
        super().__init__(pid)

    @property
    def work_s(self) -> float:
        return cpu_s(self._pid) - self._at_start_s


CLOCKS: dict[str, type[WorkClock]] = {"wall": WallClock, "cpu": CPUClock, "without waiting": WorkClock}


@dataclass(frozen=True, slots=True)
class Sizes:
    cases: int
    spread: float
    """Sigma of the logarithms of the runs of one test case."""
    hanging_share: float


class Run(NamedTuple):
    case: int
    cpu_s: float
    sleep_s: float
    hang: Hang | None


def main() -> None:
    parser = arguments_of(__doc__, "rewards.limits")
    parser.set_defaults(output=ROOT / "benchmarks/results/rewards_limits.json")
    add = parser.add_argument
    add("--cases", type=int, default=36, help=f"test cases, each with {RUNS_PER_CASE} runs (default %(default)s)")
    add("--spread", type=float, default=0.1, help="sigma of the logarithms of a case's runs (default %(default)s)")
    add("--hanging-share", type=float, default=0.05, help="of the runs, half of them asleep (default %(default)s)")
    args = parser.parse_args()
    result = asyncio.run(measure(args, Sizes(args.cases, args.spread, args.hanging_share)))
    publish(args, result, tables)


async def measure(args: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    terms = {name: getattr(TERMS, name) for name in ("factor", "shortest_s", "longest_s")}
    workload = asdict(sizes) | {"runs_per_case": RUNS_PER_CASE, "median_s": MEDIAN_S, "case_sigma": CASE_SIGMA} | terms
    record = record_of_run(seed=args.seed, workload=workload)
    runs = drawn(sizes, args.seed)
    num_cores = len(os.sched_getaffinity(0))
    rows = []
    for cores, (num_beside, program) in BESIDE.items():
        for clock in CLOCKS:
            with running(program, num_beside * num_cores):
                load = os.getloadavg()[0]
                grades = await graded(runs, clock, num_cores)
            rows.append({"cores": cores, "clock": clock, "load": load} | summary(runs, grades))
            Console(stderr=True).print(f"{cores}, {clock}: {rows[-1]['num_killed']} killed", highlight=False)
    as_drawn = [
        {"spread": spread} | {f"factor {factor:g}": killed_as_drawn(spread, factor, args.seed) for factor in FACTORS}
        for spread in SPREADS
    ]
    return record | {"clocks": rows, "as_drawn": as_drawn}


def drawn(sizes: Sizes, seed: int) -> list[Run]:
    """Case by case; a case's first runs never hang, so that what hangs meets a limit that was learned."""
    rng = random.Random(seed)
    runs = []
    for case in range(sizes.cases):
        median_s, cpu_share = MEDIAN_S * math.exp(rng.gauss(0, CASE_SIGMA)), rng.random()
        for index in range(RUNS_PER_CASE):
            seconds = median_s * math.exp(rng.gauss(0, sizes.spread))
            hangs = index >= RUNS_PER_CASE // 2 and rng.random() < 2 * sizes.hanging_share
            hang: Hang | None = rng.choice(("sleeps", "spins")) if hangs else None
            runs.append(Run(case, cpu_share * seconds, (1 - cpu_share) * seconds, hang))
    return runs


def work(text: str) -> float:
    """In a grading process: one run."""
    its = json.loads(text)
    while its["hang"]:
        if its["hang"] == "sleeps":
            time.sleep(3600)
    end_s = time.thread_time() + its["cpu_s"]
    while time.thread_time() < end_s:
        pass
    time.sleep(its["sleep_s"])
    return 1.0


class Timed(NamedTuple):
    grade: Grade
    limit_s: float
    """Before the run."""
    wall_s: float


async def graded(runs: Sequence[Run], clock: str, num_processes: int) -> list[Timed]:
    ahead = iter(enumerate(runs))
    timed: dict[int, Timed] = {}

    async def one_after_the_other() -> None:
        for index, run in ahead:
            trajectory = Trajectory(f"case {run.case}", json.dumps(run._asdict()))
            limit_s = grader.limits.limit_s(case_of(trajectory, b"work"))
            began = time.monotonic()
            grade = await grader.grade("work", trajectory)
            timed[index] = Timed(grade, limit_s, time.monotonic() - began)

    with patch.object(pool, "WorkClock", CLOCKS[clock]):
        async with Grader({"work": work}, num_processes=num_processes, limits=TERMS) as grader:
            await grader.check()
            await asyncio.gather(*(one_after_the_other() for _ in range(num_processes)))
    return [timed[index] for index in range(len(runs))]


def summary(runs: Sequence[Run], timed: Sequence[Timed]) -> dict[str, Any]:
    """Of correct runs which were killed, of hanging ones how long they lived, in their limits."""
    pairs = list(zip(runs, timed, strict=True))
    correct = [each for run, each in pairs if run.hang is None]
    killed = sum(each.grade.status == "timeout" for each in correct)
    row: dict[str, Any] = {"num_correct": len(correct), "num_killed": killed, "killed_share": killed / len(correct)}
    row["num_other"] = sum(each.grade.status not in ("ok", "timeout") for each in timed)
    for hang in ("sleeps", "spins"):
        ended = [each for run, each in pairs if run.hang == hang]
        row[hang] = {
            "num_runs": len(ended),
            "num_killed": sum(each.grade.status == "timeout" for each in ended),
            "median_limits": median_of_known((each.wall_s / each.limit_s for each in ended), 2),
            "largest_s": round(max((each.wall_s for each in ended), default=0.0), 2),
        }
    return row


def killed_as_drawn(spread: float, factor: float, seed: int) -> float:
    """The share of correct runs that the rule ends where nothing waits and runs of a case come one after the other."""
    limits, num_killed = TimeLimits(replace(TERMS, factor=factor)), 0
    runs = drawn(Sizes(DRAWN_CASES, spread, 0.0), seed)
    for run in runs:
        seconds = run.cpu_s + run.sleep_s
        is_killed = seconds > limits.limit_s(str(run.case))
        num_killed += is_killed
        limits.observe(str(run.case), seconds, is_correct=not is_killed)
    return num_killed / len(runs)


def cpu_s(pid: int) -> float:
    """Of a process and all that it has started."""
    total = 0.0
    try:
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            total += sum(each.cpu_times()[:2])
    except psutil.Error:
        pass
    return total


@contextmanager
def running(program: str, num_processes: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def tables(result: dict[str, Any]) -> str:
    cells = {
        "cores": lambda row: row["cores"],
        "clock": lambda row: row["clock"],
        "correct runs killed": lambda row: f"{row['num_killed']} of {row['num_correct']:,}",
        "share": lambda row: percent(row["killed_share"], 2),
        "asleep: lived, in limits": lambda row: number(row["sleeps"]["median_limits"], 2),
        "spinning: lived, in limits": lambda row: number(row["spins"]["median_limits"], 2),
        "longest, s": lambda row: number(max(row["sleeps"]["largest_s"], row["spins"]["largest_s"]), 2),
    }
    drawn_cells = {
        "sigma within a test case": lambda row: number(row["spread"], 2),
        **{f"factor {factor:g}": partial(_share_at, f"factor {factor:g}") for factor in FACTORS},
    }
    clocks = columns("Limits learned by three clocks", result["clocks"], cells)
    return clocks + "\n\n" + columns("Correct runs that the rule alone ends", result["as_drawn"], drawn_cells)


def _share_at(name: str, row: dict[str, Any]) -> str:
    return percent(row[name], 2)


if __name__ == "__main__":
    main()

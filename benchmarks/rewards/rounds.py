"""Rollout and rewards of a round at RollPacker's shape (4.3, 6.5): `python -m benchmarks.rewards.rounds`.

Servers run on an emulated device. Programs are real, run in the sandbox of `code`, and are really killed. A round has
16 prompts x 8 answers of the paper's 7B/8k, with one test each. 5 % of runs hang until they are killed. The others are
log-normal around 1 s, and half of them pass. Lengths and step costs are those of `benchmarks/rollpacker.py`. One token
here stands for TOKENS of the model's, so that the host keeps up. All seconds (of the device, of programs and of their
limits) are the paper's times --scale. Programs mostly sleep, because this machine has few cores. 16 are graded at once.

Each round is measured in three ways, in turns, with the same answers and the same results of their programs:

  after     the rollout, then its answers are graded at once (`vllm_rollout.parts.rewards.grading.Grader`); a run may
  take 30 s async     the server grades each answer as it ends (`"reward": "code"`); a run may take 30 s learned   as
  async, with limits that adapt: 1.5 x the longest right run of the test case, 2 to 30 s

There are two kinds of rounds: one waits for all answers, one takes the first 8 of 10 (a short round's rollout). Each
repeat is an epoch over the same prompts with new answers. Epoch 0 does not count: limits adapt and processes start.

Invariant: a run is drawn as right, wrong or hanging before anything is graded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from rich.console import Console

from benchmarks.common import ROOT, arguments_of, median, percentile, publish, quartiles, ratios, record_of_run
from benchmarks.rewards.fated import TestCase, stand_for_programs
from benchmarks.rollpacker import GPU_SOURCE, MODELS, PROMPT_TOKENS, TAIL_SOURCE, TAILS
from benchmarks.tables import INK, bars, columns, number, percent, picture
from vllm_rollout import AsyncRolloutClient
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.parts.rewards.grading import Grader, Trajectory
from vllm_rollout.parts.rewards.rules.time_limits import LimitTerms
from vllm_rollout.process import ServerProcess, exit_on_sigterm, free_port, log_folder, server_environment

MODEL = "7B/8k"
TOKENS = 50
"""Tokens of the model for each token of the emulated device."""
HANGING, RIGHT = 0.05, 0.5
"""Share of hanging runs (RollPacker 4.3), and of right ones among the others. The second is assumed."""
SIGMA = 0.6
"""Standard deviation of log seconds of runs that end, within and between test cases together. Assumed."""
WITHIN_SHARE = 0.25
"""Share of the variance that is within a test case. Assumed."""
PAPER = LimitTerms()

WAYS = {"after": "after the rollout", "async": "as they end", "learned": "as they end,\nlimits that learn"}
COLORS = {"after": "#94a3b8", "async": "#f59e0b", "learned": "#0f766e"}
SHAPES = {"all": "all 8 answers are waited for", "race": "the first 8 of 10 answers"}
REDUNDANCY = {"all": 0, "race": 2}
RATIOS = (("after", "async"), ("async", "learned"), ("after", "learned"))


@dataclass(frozen=True)
class Workload:
    num_prompts: int
    group_size: int
    num_processes: int
    scale: float
    """Seconds here for a second of the paper's."""
    seed: int

    @property
    def device(self) -> dict[str, Any]:
        """For `--rollout-emulate`: one engine. A step and its context cost as much as `TOKENS` steps of the model."""
        cost = MODELS[MODEL].cost
        empty_s, one_token_s = cost.ptl(1, 0), cost.ptl(1, 1)
        step_ms, tail = 1e3 * TOKENS * self.scale, TAILS[MODEL].described()
        return {
            "step": {
                "ms": step_ms * empty_s,
                "ms_per_request": 0.0,
                "ms_per_context_token": step_ms * TOKENS * (one_token_s - empty_s),
                "ms_per_prefilled_token": step_ms * cost.prefill_s_per_token,
            },
            "lengths": {"log_normal": tail | {"mean": tail["mean"] / TOKENS}},
            "seed": self.seed,
        }

    @property
    def max_tokens(self) -> int:
        return MODELS[MODEL].max_tokens // TOKENS

    @property
    def cases(self) -> dict[str, TestCase]:
        """Test case by prompt."""
        chance = random.Random(f"rewards/{self.seed}")
        between, within = SIGMA * (1 - WITHIN_SHARE) ** 0.5, SIGMA * WITHIN_SHARE**0.5
        return {
            name: TestCase(name, self.scale * chance.lognormvariate(0, between), within, HANGING, RIGHT)
            for name in map(str, range(self.num_prompts))
        }

    @property
    def limits(self) -> LimitTerms:
        return LimitTerms(PAPER.factor, PAPER.shortest_s * self.scale, PAPER.longest_s * self.scale)

    def prompts(self) -> list[dict[str, Any]]:
        chance = random.Random(f"prompts/{self.seed}")
        return [
            {
                "id": name,
                "prompt_token_ids": [chance.randrange(100, 40_000) for _ in range(PROMPT_TOKENS // TOKENS)],
                "data": {"tests": [case.source]},
            }
            for name, case in self.cases.items()
        ]


class Graded(NamedTuple):
    """An answer of a round, with its grade."""

    prompt_id: str
    text: str
    reward: float | None
    status: str
    seconds: float


class Round(NamedTuple):
    rollout_s: float
    """Seconds until the last answer."""
    round_s: float
    """Seconds until the last reward."""
    graded: list[Graded]


def main() -> None:
    parser = arguments_of(__doc__, "rewards.rounds", seed=3, repeats=5, plot=True)
    parser.set_defaults(output=ROOT / "benchmarks/results/rewards.json", plot=ROOT / "docs/images/rewards.png")
    add = parser.add_argument
    add("--prompts", type=int, default=16, help="prompts per round (default %(default)s)")
    add("--group-size", type=int, default=8, help="answers per group (default %(default)s)")
    add("--processes", type=int, default=16, help="processes that grade, in each way (default %(default)s)")
    add("--scale", type=float, default=0.4, help="seconds here for a second of the paper's (default %(default)s)")
    arguments = parser.parse_args()
    exit_on_sigterm()
    its = Workload(arguments.prompts, arguments.group_size, arguments.processes, arguments.scale, arguments.seed)
    conditions = {
        "conditions": __doc__, "model": MODELS[MODEL].described(), "device": its.device, "max_tokens": its.max_tokens,
        "prompts": its.num_prompts, "group_size": its.group_size, "processes": its.num_processes, "scale": its.scale,
        "hanging": HANGING, "right": RIGHT, "sigma": SIGMA, "within_share": WITHIN_SHARE,
        "sources": [GPU_SOURCE, TAIL_SOURCE],
    }  # fmt: skip
    result = record_of_run(seed=its.seed, workload=conditions)
    rows = measure(its, arguments)
    publish(arguments, {**result, "rounds": rows, "results": results_of(rows)}, tables, draw)


def measure(its: Workload, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    fixed_s = its.limits.longest_s
    with log_folder() as folder, ExitStack() as stack:
        servers = {
            "async": server(its, f"{fixed_s},{fixed_s}", folder / "async"),
            "learned": server(its, f"{its.limits.shortest_s},{fixed_s}", folder / "learned"),
        }
        for each in servers.values():
            stack.enter_context(each).wait_until_healthy(lambda seconds, line: None)
        return uvloop.run(_measure(its, arguments.repeats, {name: each.url for name, each in servers.items()}))


def server(its: Workload, limits: str, folder: Path) -> ServerProcess:
    folder.mkdir()
    device = folder / "device.json"
    device.write_text(json.dumps(its.device))
    model = resolve(DEFAULT_MODEL)
    flags = [
        "--max-model-len", "1024", "--max-num-seqs", "1024", "--max-num-batched-tokens", "8192", "--block-size", "32",
        "--rollout-emulate", str(device), "--disable-uvicorn-access-log", "--rollout-reward", "code",
        "--rollout-reward-processes", str(its.num_processes), "--rollout-reward-limits", limits,
    ]  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.rewards.fated", "serve", model, *flags]
    return ServerProcess(command, free_port(), server_environment(model), folder / "server.log")


async def _measure(its: Workload, repeats: int, urls: Mapping[str, str]) -> list[dict[str, Any]]:
    stand_for_programs()
    fixed = LimitTerms(1.0, its.limits.longest_s, its.limits.longest_s)
    turns = [(shape, way) for shape in SHAPES for way in WAYS]
    rows = []
    async with (
        Grader({"code": "code"}, num_processes=its.num_processes, limits=fixed) as grader,
        AsyncRolloutClient(urls["async"]) as plain,
        AsyncRolloutClient(urls["learned"]) as learned,
    ):
        for epoch in range(repeats + 1):
            turns.append(turns.pop(0))
            for shape, way in turns:
                client, own = (learned if way == "learned" else plain), (grader if way == "after" else None)
                load = os.getloadavg()[0]
                row = row_of(its, await one_round(its, client, shape, epoch, own))
                rows.append({"shape": shape, "way": way, "epoch": epoch, "load": round(load, 1), **row})
                said = f"epoch {epoch}: {shape}, {way}: {row['round_s']:.1f} s, {row['num_right_killed']} killed"
                Console(stderr=True).print(said, highlight=False)
    return rows


async def one_round(its: Workload, client: AsyncRolloutClient, shape: str, epoch: int, grader: Grader | None) -> Round:
    """Run one round. `grader`: of the client, or None if the server grades."""
    prompts, seed = its.prompts(), 1_000_000 * (2 * epoch + (shape == "race") + 1)
    sampling = {"max_tokens": its.max_tokens, "seed": seed}
    options: dict[str, Any] = {"include": ["text"], "sampling_params": sampling}
    if grader is None:
        options["reward"] = "code"
    answers: dict[tuple[str, int], str] = {}
    graded: list[Graded] = []
    began = ended = time.perf_counter()
    async for event in client.stream(prompts, its.group_size, REDUNDANCY[shape], **options):
        if event.type not in ("trajectory", "reward"):
            continue
        said = event
        if event.type == "trajectory":
            said = event.trajectory
            answers[event.prompt_id, said.index] = said.text or ""
            ended = time.perf_counter()
        if said.reward_status is not None:
            text = answers[event.prompt_id, said.index]
            graded.append(Graded(event.prompt_id, text, said.reward, said.reward_status, said.reward_s or 0.0))
    assert len(answers) == its.num_prompts * its.group_size
    if grader is not None:
        ended = time.perf_counter()
        by_id = {prompt["id"]: prompt for prompt in prompts}

        async def grade(prompt_id: str, text: str) -> Graded:
            of_it = await grader.grade("code", Trajectory(prompt_id, text, by_id[prompt_id]["data"]))
            return Graded(prompt_id, text, of_it.reward, of_it.status, of_it.seconds)

        graded = await asyncio.gather(*(grade(prompt_id, text) for (prompt_id, _), text in answers.items()))
    assert len(graded) == len(answers)
    return Round(ended - began, time.perf_counter() - began, graded)


def row_of(its: Workload, round: Round) -> dict[str, Any]:
    """Counts and times of a round, in seconds of this machine."""
    kinds = [its.cases[each.prompt_id].fate(each.text)[0] for each in round.graded]
    seconds = [each.seconds for each in round.graded]
    right = [each for each, kind in zip(round.graded, kinds, strict=True) if kind == "right"]
    return {
        "rollout_s": round.rollout_s,
        "round_s": round.round_s,
        "num_graded": len(round.graded),
        "num_hanging": kinds.count("hangs"),
        "num_right": len(right),
        "num_right_killed": sum(each.status == "timeout" for each in right),
        "num_right_unrewarded": sum(each.reward != 1 for each in right),
        "num_timeouts": sum(each.status == "timeout" for each in round.graded),
        "num_errors": sum(each.status == "error" for each in round.graded),
        "grading_p50_s": median(seconds),
        "grading_p99_s": percentile(seconds, 99),
        "grading_sum_s": sum(seconds),
    }


def results_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By shape: medians of each way, and ratios within an epoch."""
    counted = [row for row in rows if row["epoch"]]
    results = []
    for shape in SHAPES:
        of_way = {way: [row for row in counted if (row["shape"], row["way"]) == (shape, way)] for way in WAYS}
        results.append({
            "shape": shape,
            "ways": {
                way: {
                    key: median(row[key] for row in mine)
                    for key in ("rollout_s", "round_s", "grading_p50_s", "grading_p99_s", "grading_sum_s")
                } | {
                    key: sum(row[key] for row in mine)
                    for key in ("num_graded", "num_hanging", "num_right", "num_right_killed", "num_errors")
                }
                for way, mine in of_way.items()
            },
            "ratios": {
                f"{slow}/{fast}": quartiles(ratios(*([row["round_s"] for row in of_way[way]] for way in (slow, fast))))
                for slow, fast in RATIOS
            },
        })  # fmt: skip
    return results


def tables(result: dict[str, Any]) -> str:
    scale, its = result["workload"]["scale"], result["workload"]
    title = f"{its['prompts']} x {its['group_size']} of {MODEL}, {its['processes']} processes; seconds of the paper's"
    rows = [
        {"shape": each["shape"], "way": way, "ratios": each["ratios"], **values}
        for each in result["results"]
        for way, values in each["ways"].items()
    ]

    def faster(row: Mapping[str, Any], than: str) -> str:
        ratio = row["ratios"].get(f"{than}/{row['way']}")
        return f"{ratio['median']:.2f} ({ratio['p25']:.2f} to {ratio['p75']:.2f})" if ratio else "—"

    return columns(title, rows, {
        "round": lambda row: SHAPES[row["shape"]],
        "graded": lambda row: " ".join(WAYS[row["way"]].split()),
        "rollout, s": lambda row: number(row["rollout_s"] / scale, 1),
        "rollout and rewards, s": lambda row: number(row["round_s"] / scale, 1),
        "× faster than after": lambda row: faster(row, "after"),
        "than as they end": lambda row: faster(row, "async"),
        "P99 of one grading, s": lambda row: number(row["grading_p99_s"] / scale, 1),
        "right ones killed": lambda row: percent(row["num_right_killed"] / row["num_right"], 2),
    })  # fmt: skip


def draw(result: dict[str, Any], path: Path) -> None:
    """A panel per kind of round: seconds of its rounds, and a line at the end of the rollout alone."""
    scale = result["workload"]["scale"]
    with picture(path, figsize=(13, 3.6), width_ratios=(1, 1), w_pad=3) as panels:
        for axes, each in zip(panels, result["results"], strict=True):
            rounds = [row for row in result["rounds"] if row["shape"] == each["shape"] and row["epoch"]]
            values = {way: row["round_s"] / scale for way, row in each["ways"].items()}
            bars(
                axes,
                values,
                colors=COLORS,
                names=WAYS,
                texts={way: f"{value:.1f} s" for way, value in values.items()},
                runs={way: [row["round_s"] / scale for row in rounds if row["way"] == way] for way in WAYS},
                title=f"Rollout and rewards: {SHAPES[each['shape']]}",
                xlabel="seconds of a round (ticks: single epochs; line: its rollout alone)",
            )
            axes.axvline(median(row["rollout_s"] / scale for row in rounds), color=INK, ls=":", lw=1.3)


if __name__ == "__main__":
    os.chdir(ROOT)
    main()

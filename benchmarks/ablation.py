"""RollPacker's ablation (its table 2), step by step, on an emulated device: `python -m benchmarks.ablation`.

Seconds of a training step: rollout, rewards, training, new weights. Each row adds one thing to the row before:

  synchronous     rounds wait for all answers; they are graded after the rollout, within 30 s each, then trained on
  tail batching   short rounds of 1.25 x prompts and 1.25 x responses, and long rounds (docs/guides/rounds.md)
  moves           groups move between ranks if that pays (`"migration": "auto"`). RollPacker's planner changes the
                  tensor-parallel size when rounds preempt. Our counterpart (`--rollout-parallelism auto`) needs one
                  engine, and here there are several. `preemptions` counts what it would decide by
  rewards         answers are graded as they end, within limits that adapt, 2 to 30 s; same rollouts as in "moves"
  stream trainer  `"scale_down": "auto"`: from `ranks_free` on, the freed ranks compute gradients of complete, graded
                  groups. When the rollout ends, all ranks do

Real: HTTP, runs, vLLM's scheduler, data-parallel engine cores, moves, drains, and the rule that adapts limits.
Emulated: three clocks.
- Device: steps and lengths are those of `benchmarks/rollpacker.py`.
- Rewards: grading takes the time drawn in `benchmarks.rewards.rounds`, which runs real processes. 5 % of runs hang
  until their limit. The others are log-normal around 1 s, and half of them are right. Limits start at the values that
  an earlier epoch would give. At most a fourth of a round's answers is graded at once, in the order in which they
  ended, including answers of deferred groups.
- Trainer: a rate in tokens per second on all devices, and the proportional share of it on freed devices. It takes one
  group after the other, and needs no memory.
Seconds of a stage are what the stage adds to the end of the step.

A row is one period: the short rounds that fill a long one, and the long one. If nothing is deferred, a row is two
rounds. Each row starts on a server without length history. Seconds are the device's: --speed 0.25 makes every step last
four times as long, so that the host keeps up. On a busy host devices wait all the same. Waits of devices that worked
until a rollout's end are measured and subtracted. The uncorrected time is in the result too.
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import httpx
import uvloop
from rich.console import Console

from benchmarks.common import ROOT, median, publish, started, write_json
from benchmarks.emulated import (
    FIRST_SEED,
    Workload,
    emulated_server,
    record_of,
    title_of,
    workload_arguments,
    workload_of,
)
from benchmarks.rewards.rounds import PAPER
from benchmarks.rewards.rounds import Workload as Rewards
from benchmarks.rollpacker import FLOPS_PER_S, PROMPT_TOKENS, Model
from benchmarks.rounds_emulated import num_prompts, terms_of
from benchmarks.tables import columns, number, percent, picture
from vllm_rollout import AsyncRolloutClient
from vllm_rollout.kernel.http.answers import GroupEvent, RanksFreeEvent, TrajectoryEvent
from vllm_rollout.parts.emulation.step_log import LoggedStep, Summary, read_steps
from vllm_rollout.parts.rewards.rules.time_limits import LimitTerms, TimeLimits
from vllm_rollout.parts.rounds.client.run import AsyncRun, Fed, RoundFeed
from vllm_rollout.process import counter, exit_on_sigterm

MFU, FLOPS_PER_PARAMETER, NETWORK_BYTES_PER_S = 0.4, 8, 50e9
TRAINER_SOURCE = (
    "8 FLOPs per parameter and token (forward and backward of the policy, forward of the reference model, which "
    "RollPacker has) at 40 % of the GPU's dense BF16 rate (The Llama 3 Herd of Models, table 4: 38 to 43 %); new "
    "weights: each GPU receives all of them over RollPacker's 400 Gbit/s"
)
NEARLY = 0.05
ANSWERS_PER_PLACE = 4
"""Answers of a round per grader. The paper gives no number. With more graders, a limit of 30 s decides."""
MOVES = {"migration": "auto"}
RUNS: dict[str, tuple[float, dict[str, Any]]] = {
    "synchronous": (1.0, {}),
    "tail": (1.25, {}),
    "moves": (1.25, MOVES),
    "scale_down": (1.25, MOVES | {"scale_down": "auto"}),
}
"""Way -> factor of speculation for prompts and responses, and further fields of the run."""


class Row(NamedTuple):
    title: str
    run: str
    graded: bool = False
    """True if answers are graded as they end."""
    streams: bool = False
    paper: float | None = None
    """Speed-up over the row before in the paper's table 2, 7B/8k. The paper adds its planner after its rewards."""


ROWS = (
    Row("synchronous", "synchronous"),
    Row("+ tail batching", "tail", paper=1.30),
    Row("+ moves", "moves", paper=2.01 / 2.01),
    Row("+ rewards as answers end", "moves", True, paper=2.01 / 1.30),
    Row("+ stream trainer", "scale_down", True, True, paper=2.03 / 2.01),
)
COLORS = {"rollout": "#0f766e", "rewards": "#f59e0b", "training": "#2563eb", "weights": "#94a3b8"}
"""Color by stage of a step."""


class Trainer(NamedTuple):
    tokens_per_s: float
    """Tokens per second on all devices."""
    weights_s: float

    @classmethod
    def of(cls, model: Model, num_ranks: int) -> Trainer:
        flops = MFU * FLOPS_PER_S * num_ranks * model.tensor_parallel_size
        return cls(flops / (FLOPS_PER_PARAMETER * model.parameters), model.weight_bytes / NETWORK_BYTES_PER_S)


class Answer(NamedTuple):
    ended_s: float
    """Seconds since the round began, on the device's clock, as for all times of a round."""
    prompt_id: str
    tokens: int
    """Tokens to train on, with the prompt's."""
    text: str
    is_returned: bool = True


class Group(NamedTuple):
    ready_s: float
    """Seconds at which all answers of the group have ended and are graded."""
    tokens: int


@dataclass
class Round:
    """Measurements of a round."""

    kind: str
    began: float = 0.0
    """Start, on this host's `time.perf_counter`."""
    free_s: float | None = None
    """Seconds at which `num_free` ranks became free."""
    num_free: int = 0
    late_s: float = 0.0
    """Seconds for which devices waited for the host."""
    answers: list[Answer] = field(default_factory=list)

    @property
    def rollout_s(self) -> float:
        return max(answer.ended_s for answer in self.answers)

    def on_time(self) -> Round:
        """The round with the devices' waits for the host subtracted."""
        share = 1 - self.late_s / self.rollout_s
        free_s = None if self.free_s is None else share * self.free_s
        answers = [answer._replace(ended_s=share * answer.ended_s) for answer in self.answers]
        return replace(self, free_s=free_s, answers=answers, late_s=0.0)


def lateness_s(ranks: Iterable[Sequence[LoggedStep]], began: float, ended: float) -> float:
    """Mean seconds that ranks waited for the host, over the ranks that worked nearly until the end of the rollout."""
    mine = [steps for log in ranks if (steps := [step for step in log if began <= step.launched <= ended])]
    end = max(steps[-1].end for steps in mine) - NEARLY * (ended - began)
    return fmean(Summary.of(steps).idle_s for steps in mine if steps[-1].end >= end)


class Rewarder:
    """Grading times of answers, and the limits that adapt to them."""

    def __init__(self, rewards: Rewards, terms: LimitTerms) -> None:
        self._places, self._cases, self._limits = rewards.num_processes, rewards.cases, TimeLimits(terms)
        for name, case in self._cases.items():
            for i in range(rewards.group_size):
                kind, seconds = case.fate(f"an epoch before/{i}")
                self._limits.observe(name, seconds, is_correct=kind == "right")

    def graded_at(self, answers: Iterable[Answer]) -> list[float]:
        """Seconds at which each answer is graded, sorted by when the answer ended.

        A free grader takes the answer that ended first.
        """
        places, learned, found = [0.0] * self._places, [], []
        for answer in sorted(answers):
            start_s = max(answer.ended_s, places[0])
            while learned and learned[0][0] <= start_s:
                _, name, seconds = heapq.heappop(learned)
                self._limits.observe(name, seconds, is_correct=True)
            kind, seconds = self._cases[answer.prompt_id].fate(answer.text)
            limit_s = self._limits.limit_s(answer.prompt_id)
            found.append(start_s + (limit_s if kind == "hangs" else min(seconds, limit_s)))
            heapq.heapreplace(places, found[-1])
            if kind == "right" and seconds <= limit_s:
                heapq.heappush(learned, (found[-1], answer.prompt_id, seconds))
        for _, name, seconds in learned:
            self._limits.observe(name, seconds, is_correct=True)
        return found


def trained_at(groups: Iterable[Group], rollout_s: float, free_s: float, share: float, tokens_per_s: float) -> float:
    """Seconds at which the last gradient is computed, one group after the other as they are ready.

    `share` of the devices computes from `free_s` on, and all of them from the end of the rollout on.
    """
    clock = free_s
    for ready_s, tokens in sorted(groups):
        clock, work_s = max(clock, ready_s), tokens / tokens_per_s
        before_end = min(work_s, share * max(0.0, rollout_s - clock))
        clock += before_end / share if share else 0.0
        if work_s > before_end:
            clock = max(clock, rollout_s) + work_s - before_end
    return clock


def stages_of(its: Round, row: Row, rewarder: Rewarder, trainer: Trainer, num_ranks: int) -> dict[str, float]:
    """Seconds that each stage adds to the end of the step."""
    rollout_s, answers = its.rollout_s, sorted(its.answers)
    if not row.graded:
        answers = [answer._replace(ended_s=rollout_s) for answer in answers if answer.is_returned]
    ready, tokens = defaultdict(float), defaultdict(int)
    for answer, at_s in zip(answers, rewarder.graded_at(answers), strict=True):
        if answer.is_returned:
            ready[answer.prompt_id] = max(ready[answer.prompt_id], at_s)
            tokens[answer.prompt_id] += answer.tokens
    graded_s = max(ready.values())
    if row.streams:
        free_s = rollout_s if its.free_s is None else its.free_s
        groups = [Group(ready[name], tokens[name]) for name in ready]
    else:
        free_s, groups = graded_s, [Group(graded_s, sum(tokens.values()))]
    end_s = trained_at(groups, rollout_s, free_s, its.num_free / num_ranks, trainer.tokens_per_s)
    return {
        "rollout": rollout_s, "rewards": graded_s - rollout_s, "training": max(0.0, end_s - graded_s),
        "weights": trainer.weights_s,
    }  # fmt: skip


async def measure(its: Workload, rewards: Rewards, name: str, client: AsyncRolloutClient) -> list[Round]:
    (speculation, fields), chance = RUNS[name], random.Random(f"ablation/{rewards.seed}")
    terms = terms_of(its, speculation, speculation)
    texts = ["".join(chance.choices("0123456789", k=PROMPT_TOKENS)) for _ in range(num_prompts(terms))]
    run = await client.run(
        terms.group_size,
        terms.prompts_per_round,
        prompt_speculation=speculation,
        response_speculation=speculation,
        sampling_params={"max_tokens": its.model.max_tokens, "seed": FIRST_SEED},
        include=["text"],
        **fields,
    )
    prompts = [{"id": str(number), "prompt": text} for number, text in enumerate(texts)]
    feed, rounds = RoundFeed(prompts, terms.prompts_per_round), []
    while (fed := feed.next(run.info)) is not None:
        rounds.append(await one_round(run, fed, its.speed))
        await run.refresh()
    await run.delete()
    return rounds


async def one_round(run: AsyncRun, fed: Fed, speed: float) -> Round:
    its, selected = Round(fed.kind or run.info.next_round, time.perf_counter()), set()
    indices = []
    async for event in run.stream(fed.prompts, kind=fed.kind):
        now = (time.perf_counter() - its.began) * speed
        match event:
            case TrajectoryEvent(trajectory=said):
                its.answers.append(Answer(now, event.prompt_id, PROMPT_TOKENS + said.num_tokens, said.text or ""))
                indices.append((event.prompt_id, said.index))
            case RanksFreeEvent():
                its.free_s, its.num_free = now, len(event.ranks)
            case GroupEvent(status="complete"):
                selected |= {(event.prompt_id, index) for index in event.selected}
    assert len(selected) == run.info.prompts_per_round * run.info.group_size
    pairs = zip(its.answers, indices, strict=True)
    its.answers = [answer._replace(is_returned=each in selected) for answer, each in pairs]
    return its


async def measure_all(arguments: argparse.Namespace, its: Workload, url: str, steps: Path, result: Any) -> None:
    """Measure all rows of each seed. Each row is added to the result as soon as it is measured."""
    trainer = Trainer.of(its.model, its.num_ranks)
    async with AsyncRolloutClient(url) as client:
        nothing = await client.state()
        for seed, name in product(result["workload"]["seeds"], RUNS):
            await client.set_state(nothing)
            num_before, load = preemptions(url), os.getloadavg()[0]
            rewards = rewards_of(its, seed)
            rounds = await measure(its, rewards, name, client)
            logs = [log.steps for log in read_steps(steps)]
            for each in rounds:
                each.late_s = its.speed * lateness_s(logs, each.began, each.began + each.rollout_s / its.speed)
            more = {"seed": seed, "load": load, "preemptions": int(preemptions(url) - num_before)}
            result["measured"] += [
                {"row": row.title, **row_of(rounds, row, rewards, trainer, its.num_ranks), **more}
                for row in ROWS
                if row.run == name
            ]
            write_json(arguments.output, result)
            said = f"seed {seed}, {name}: {result['measured'][-1]['group_s']:.3f} s per group"
            Console(stderr=True).print(said, highlight=False)


def rewards_of(its: Workload, seed: int) -> Rewards:
    """Rewards for the prompts of a period, on the device's clock."""
    count = num_prompts(terms_of(its, 1.25, 1.25))
    return Rewards(count, its.group_size, its.num_prompts * its.group_size // ANSWERS_PER_PLACE, 1.0, seed)


def preemptions(url: str) -> float:
    return counter(httpx.get(f"{url}/metrics", timeout=60).text, "vllm:num_preemptions_total")


def row_of(rounds: Sequence[Round], row: Row, rewards: Rewards, trainer: Trainer, num_ranks: int) -> dict[str, Any]:
    """Seconds per trained group by stage and in all, without the host's delays and as measured, and each round."""
    returned = [answer for each in rounds for answer in each.answers if answer.is_returned]
    num_groups = len(returned) // rewards.group_size
    terms = PAPER if row.graded else replace(PAPER, shortest_s=PAPER.longest_s)

    def stages(its: Iterable[Round]) -> list[dict[str, float]]:
        rewarder = Rewarder(rewards, terms)
        return [stages_of(each, row, rewarder, trainer, num_ranks) for each in its]

    def per_group(its: list[dict[str, float]]) -> dict[str, float]:
        return {stage: sum(each[stage] for each in its) / num_groups for stage in COLORS}

    on_time = stages([each.on_time() for each in rounds])
    seconds, training_s = per_group(on_time), sum(answer.tokens for answer in returned) / trainer.tokens_per_s
    return {
        "group_s": sum(seconds.values()), "stages": seconds,
        "measured_group_s": sum(per_group(stages(rounds)).values()),
        "training_hidden": max(0.0, 1 - seconds["training"] * num_groups / training_s),
        "late_share": sum(each.late_s for each in rounds) / sum(each.rollout_s for each in rounds),
        "rounds": [
            {"kind": each.kind, "stages": its, "measured_rollout_s": each.rollout_s, "late_s": each.late_s,
             "free_s": each.free_s, "num_free": each.num_free}
            for each, its in zip(rounds, on_time, strict=True)
        ],
    }  # fmt: skip


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Medians over seeds. `factors` and `steps` are per seed, against the first row and against the row before."""
    found: list[dict[str, Any]] = []
    for row in ROWS:
        runs = {each["seed"]: each for each in result["measured"] if each["row"] == row.title}
        if not runs:
            continue
        seconds = {seed: each["group_s"] for seed, each in runs.items()}
        of_first, of_last = (found[0]["seconds"], found[-1]["seconds"]) if found else (seconds, seconds)
        found.append({
            "title": row.title, "paper": row.paper, "seconds": seconds,
            "factors": [of_first[seed] / seconds[seed] for seed in seconds],
            "steps": [of_last[seed] / seconds[seed] for seed in seconds],
            "stages": {stage: median(each["stages"][stage] for each in runs.values()) for stage in COLORS},
            "preemptions": sum(each["preemptions"] for each in runs.values()),
            **{key: median(each[key] for each in runs.values())
               for key in ("training_hidden", "late_share", "measured_group_s")},
        })  # fmt: skip
    return found


def table(result: dict[str, Any]) -> str:
    def stage_ms(stage: str, row: dict[str, Any]) -> str:
        return number(1000 * row["stages"][stage], 0)

    return columns(f"{title_of(result)}; ms per group", rows_of(result), {
        "": lambda row: row["title"],
        **{stage: partial(stage_ms, stage) for stage in COLORS},
        "all": lambda row: number(1000 * median(row["seconds"].values()), 0),
        "× faster": lambda row: number(median(row["factors"]), 2),
        "than the row before, each seed": lambda row: ", ".join(number(each, 2) for each in row["steps"]),
        "in the paper": lambda row: number(row["paper"], 2),
        "training hidden": lambda row: percent(row["training_hidden"]),
        "preemptions": lambda row: number(row["preemptions"]),
        "all, with the host's lateness": lambda row: number(1000 * row["measured_group_s"], 0),
        "lateness, share of rollouts": lambda row: percent(row["late_share"]),
    })  # fmt: skip


def draw(result: dict[str, Any], path: Path) -> None:
    """A bar per row, made of the seconds that each stage adds."""
    rows = rows_of(result)
    with picture(path, figsize=(9, 3.2), width_ratios=(1,), w_pad=1) as (axes,):
        left = [0.0] * len(rows)
        for stage, color in COLORS.items():
            widths = [1000 * row["stages"][stage] for row in rows]
            axes.barh([row["title"] for row in rows], widths, left=left, color=color, height=0.62, label=stage)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds that each stage adds to a step, per group that is trained on")
        axes.legend(frameon=False, loc="lower right")


def main() -> None:
    parser = workload_arguments(__doc__, "ablation", ranks=8, prompts=64, speed=0.25)
    add = parser.add_argument
    add("--repeats", type=int, default=2, help="number of seeds, from --seed on (default %(default)s)")
    add(
        "--output-picture",
        dest="plot",
        type=Path,
        default=ROOT / "docs/images/ablation.png",
        help="file for the picture (default %(default)s)",
    )
    arguments = parser.parse_args()
    exit_on_sigterm()
    its = workload_of(arguments)
    result = record_of(its, __doc__) | {"measured": []}
    result["workload"] |= {
        "seeds": [its.seed + i for i in range(arguments.repeats)], "places": rewards_of(its, 0).num_processes,
        "trainer": Trainer.of(its.model, its.num_ranks)._asdict() | {"source": TRAINER_SOURCE},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name, started(emulated_server(its, Path(name))) as server:
        uvloop.run(measure_all(arguments, its, server.url, Path(name) / "steps", result))
    publish(arguments, result, table, draw)


if __name__ == "__main__":
    main()

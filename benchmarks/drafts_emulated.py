"""Drafts on an emulated 7B model: long rounds and their tails with and without drafts, by batch size and spread of
lengths.

vLLM's scheduler, its groups and the rule that chooses drafts are real. The device's steps are emulated, and so are
drafts and whether they are right. Acceptance is as measured with 16 answers of Qwen2.5-Coder-0.5B-Instruct per prompt
at temperature 1. All seconds are the device's, so results do not depend on this host and a run repeats to the digit.
The cost on the host is left out: drafts need vLLM's synchronous loop.

device   roofline: a step reads 7.6 billion weights in bfloat16 at 3.35 TB/s or computes its tokens, drafts among them,
         at 989 TFLOP/s, whichever takes longer, and reads the KV cache.
         overhead: examples/emulate_7b.json, with 5.2 ms for an empty step and 12 us per token
         cpu: SmolLM2-135M on one core, 36 ms for an empty step and 1.9 ms per token
         arithmetic: 1 ms for an empty step and 20 ms per token, so that a draft costs as much as a candidate
long     a round that waits for all its candidates, in groups of 16 or one smaller group; sigma 0: all candidates have
         the same length, so the batch keeps its size
deferred as long, for prompts with 16 answers from an earlier short round. Each of these counts like 6 siblings
         (complete answers) or like 3 (answers cut at a quarter to a half of the longest)
poor     drafts that are right once in twenty times
short    a round of answers with 64 to 128 tokens; short-poor: with poor drafts
tail     from the moment at which a quarter of the candidates is left

Each cell: median over seeds of the paired ratio, seconds without drafts over seconds with drafts. Simulated: the same
ratio by the simulator.

Run from the repository root: python -m benchmarks.drafts_emulated
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.common import arguments_of, median, median_of_known, publish, record_of_run
from benchmarks.rollpacker import GPU_SOURCE, MODEL_SOURCE, MODELS, PROMPT_TOKENS
from benchmarks.tables import columns, number, percent
from tests.parts.emulation.emulated_run import EmulatedRun
from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.model_files import tiny
from vllm_rollout.parts.drafts.rules import draft_key
from vllm_rollout.parts.emulation.device import cost_of
from vllm_rollout.parts.emulation.settings import Settings, settings_type
from vllm_rollout.parts.shaping.profile_file import CurveFit, EngineFacts, Profile
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.race import PoolCandidate, Race
from vllm_rollout.simulator.rank import run_races

GROUP_SIZE = 16
NUM_EARLIER = 16
"""Answers of a deferred prompt in its short round."""
MEAN_TOKENS = 900
MAX_TOKENS = 8192
POOR = [{"share": 0.5, "accepted": [0.05, 0.02]}]
SHORT_TOKENS = 64, 128
MAX_SHORT_SIZE = 64
"""Largest batch size for short answers."""
SLOW_STEPS = {
    "cpu": {"ms": 36.0, "ms_per_request": 1.9},
    "arithmetic": {"ms": 1.0, "ms_per_request": 20.0},
}
GOALS = {"long": 1.5, "deferred": 1.7}
MAX_LOSS = 0.02
PARTS = ("long", "deferred", "poor", "short", "short-poor")
ROOFLINE = "roofline.json"


class Cell(NamedTuple):
    device: str
    part: str
    batch_size: int
    sigma: float
    earlier_answer: float = 6.0


def main() -> None:
    parser = arguments_of(__doc__, "drafts_emulated", repeats=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256], help="batch sizes")
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.0, 0.5, 0.8, 1.3], help="deviation of log length")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to run (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="processes, which change no result (%(default)s)")
    arguments = parser.parse_args()
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    workload = {
        "conditions": __doc__, "mean_tokens": MEAN_TOKENS, "max_tokens": MAX_TOKENS, "group_size": GROUP_SIZE,
        "prompt_tokens": PROMPT_TOKENS, "repeats": arguments.repeats, "sources": [GPU_SOURCE, MODEL_SOURCE],
        "goals": GOALS,
    }  # fmt: skip
    result = record_of_run(seed=arguments.seed, workload=workload) | {"cells": []}
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        folder = Path(name)
        tiny(str(folder / "model"))
        roofline().write(folder / ROOFLINE)
        seeds = range(arguments.seed, arguments.seed + arguments.repeats)
        wanted = [(cell, [pool.submit(measure, folder, cell, seed) for seed in seeds]) for cell in all_cells(arguments)]
        for cell, runs in wanted:
            row = cell._asdict() | summary([run.result() for run in runs])
            result["cells"].append(row)
            Console(stderr=True, width=120).print(f"{cell}: {row['faster']:.3f}", highlight=False)
    result["summary"] = verdicts(result["cells"])
    publish(arguments, result, tables)


def all_cells(arguments: argparse.Namespace) -> list[Cell]:
    sizes, sigmas = arguments.sizes, arguments.sigmas
    long = [Cell("roofline", "long", size, sigma) for size in sizes for sigma in sigmas]
    deferred = [
        Cell("roofline", "deferred", size, sigma, weight)
        for weight in (6.0, 3.0)
        for size in sizes
        for sigma in sigmas
        if sigma in (0.0, 0.8)
    ]
    others = [Cell("overhead", "long", size, sigma) for size in sizes for sigma in sigmas if sigma in (0.0, 0.8)]
    poor = [Cell(device, "poor", size, 0.0) for device in ("roofline", "overhead") for size in sizes]
    short = [
        Cell(device, part, size, 0.0)
        for part in ("short", "short-poor")
        for device in SLOW_STEPS
        for size in sizes
        if size <= MAX_SHORT_SIZE
    ]
    return [cell for cell in long + deferred + others + poor + short if cell.part in arguments.parts]


def settings_of(folder: Path, cell: Cell) -> Settings:
    drafts: dict[str, Any] = {"earlier_answer": cell.earlier_answer}
    if cell.part.endswith("poor"):
        drafts["kinds"] = POOR
    if cell.device in SLOW_STEPS:
        return settings_type().model_validate({"step": SLOW_STEPS[cell.device], "drafts": drafts})
    if cell.device == "overhead":
        step = Settings.read("examples/emulate_7b.json").step
        assert step is not None, "the example says what a step takes"
        return settings_type().model_validate({"step": step.model_dump(), "drafts": drafts})
    return settings_type().model_validate({"profile": str(folder / ROOFLINE), "drafts": drafts})


def roofline() -> Profile:
    """The step times of a 7B model in `benchmarks/rollpacker.py`, as a profile."""
    model = MODELS["7B/8k"]
    cost, capacity = model.cost, model.machine.kv_capacity_tokens
    assert capacity is not None, "a GPU's memory is bounded"
    facts = EngineFacts(
        tensor_parallel_size=1, max_num_seqs=1024, max_model_len=2 * MAX_TOKENS, max_num_batched_tokens=8192,
        block_size=16, kv_capacity_tokens=capacity, kv_bytes_per_token=model.kv_bytes_per_token,
        prefill_s_per_token=cost.prefill_s_per_token, step_prefill_s=0.0,
    )  # fmt: skip
    fits = [
        CurveFit(
            tensor_parallel_size=1, context_tokens=round(context), mean_context_tokens=context,
            batch_sizes=curve.batch_sizes, seconds=curve.seconds, r_squared=1.0, residuals={},
        )
        for context, curve in cost.curves
    ]  # fmt: skip
    return Profile(
        created="", updated="", command="", model_name=model.title, model={}, hardware={}, versions={}, serve_flags=(),
        flags={}, logprobs=True, engines=(facts,), fits=tuple(fits),
    )  # fmt: skip


def measure(folder: Path, cell: Cell, seed: int) -> dict[str, Any]:
    """One seed of a cell: the same candidates with and without drafts."""
    lengths, settings = lengths_of(cell, seed), settings_of(folder, cell)
    row: dict[str, Any] = {}
    for name, drafts in (("plain", False), ("drafted", True)):
        run = emulate(str(folder / "model"), settings, cell, lengths, seed, drafts=drafts)
        rows = sum(step.work.num_requests for step in run.steps)
        row[name] = {
            "seconds": run.seconds,
            "tail_s": run.seconds - before_tail(run, cell.batch_size),
            "steps": len(run.steps),
            "tokens_per_row": sum(step.num_sampled for step in run.steps) / rows,
            "drafts_per_row": sum(step.work.num_drafts for step in run.steps) / rows,
            "simulated_s": simulate(settings, cell, lengths, drafts=drafts),
        }
    return row


def lengths_of(cell: Cell, seed: int) -> list[list[int]]:
    """Lengths of candidates by group, in tokens: uniform for short answers, log-normal otherwise."""
    chance = random.Random(f"drafts_emulated/{seed}/{cell.batch_size}/{cell.sigma}")
    size = min(GROUP_SIZE, cell.batch_size)

    def length() -> int:
        if cell.part.startswith("short"):
            return chance.randint(*SHORT_TOKENS)
        return round(MEAN_TOKENS * chance.lognormvariate(-(cell.sigma**2) / 2, cell.sigma))

    draw = [length() for _ in range(cell.batch_size)]
    return [[max(1, min(MAX_TOKENS, n)) for n in draw[at : at + size]] for at in range(0, cell.batch_size, size)]


def emulate(
    model: str, settings: Settings, cell: Cell, lengths: list[list[int]], seed: int, *, drafts: bool
) -> EmulatedRun:
    run = EmulatedRun(
        model, settings, drafts=drafts, max_model_len=2 * MAX_TOKENS, options=ServeOptions(audit_ratio=0.0)
    )
    for number_of, its in enumerate(lengths):
        prompt = [100 + (1000 * seed + number_of) % 30_000, *range(1, PROMPT_TOKENS)]
        if cell.part == "deferred" and run.drafts is not None:
            for earlier in range(NUM_EARLIER):
                run.drafts.know(f"short/{number_of}/{earlier}", draft_key("", prompt, ""), "short")
        run.launch(f"g{number_of}", its, prompt, GroupTerms(len(its), len(its)), max_tokens=MAX_TOKENS)
    run.run(max_steps=10**6)
    return run


def before_tail(run: EmulatedRun, batch_size: int) -> float:
    """Seconds until a quarter of the candidates is left."""
    ends = zip(run.ends, run.steps, strict=True)
    return max((end for end, step in ends if step.work.num_requests > batch_size / 4), default=0.0)


def simulate(settings: Settings, cell: Cell, lengths: list[list[int]], *, drafts: bool) -> float:
    machine = Machine(cost_of(settings), drafts=settings.drafts).with_drafts(drafts)
    races = []
    for number_of, its in enumerate(lengths):
        pool = [PoolCandidate(length, "stop", length, False, None, None) for length in its]
        race = Race(str(number_of), GroupPlan(len(its)), pool, PROMPT_TOKENS)
        race.num_earlier = NUM_EARLIER if cell.part == "deferred" else 0
        races.append(race)
    return run_races(machine, races).seconds


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    def faster(field: str) -> list[float | None]:
        pairs = [(run["plain"][field], run["drafted"][field]) for run in runs]
        return [plain / drafted if plain and drafted else None for plain, drafted in pairs]

    simulated = [run["drafted"]["simulated_s"] / run["drafted"]["seconds"] - 1 for run in runs]
    return {
        "faster": median_of_known(faster("seconds")),
        "faster_by_seed": faster("seconds"),
        "tail_faster": median_of_known(faster("tail_s")),
        "faster_simulated": median_of_known(faster("simulated_s")),
        "simulators_error": median(simulated),
        "tokens_per_row": median(run["drafted"]["tokens_per_row"] for run in runs),
        "drafts_per_row": median(run["drafted"]["drafts_per_row"] for run in runs),
        "plain_s": median(run["plain"]["seconds"] for run in runs),
    }


def verdicts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest loss, and for each part its goal and how many cells reach it."""
    slowest = min(min(row["faster_by_seed"]) for row in rows)
    goals = {}
    for part, goal in GOALS.items():
        its = [row for row in rows if row["part"] == part and row["device"] == "roofline"]
        reached = [row for row in its if row["faster"] >= goal]
        goals[part] = {"goal": goal, "cells": len(its), "reached": len(reached), "median": median_of(its)}
    return {"largest_loss": max(0.0, 1 - slowest), "allowed": MAX_LOSS, "goals": goals}


def median_of(rows: list[dict[str, Any]]) -> float | None:
    return median(row["faster"] for row in rows) if rows else None


def tables(result: dict[str, Any]) -> str:
    rows = result["cells"]

    def cell_of(part: str, size: int, device: str = "roofline", **wanted: float) -> dict[str, Any] | None:
        for row in rows:
            same = (row["part"], row["batch_size"], row["device"]) == (part, size, device)
            if same and all(row[name] == value for name, value in wanted.items()):
                return row
        return None

    def shown(row: dict[str, Any] | None, field: str = "faster") -> str:
        return number(None if row is None else row[field], 2)

    def ranged(row: dict[str, Any] | None) -> str:
        seeds = (row or {}).get("faster_by_seed", [])
        return shown(row) + (f" ({min(seeds):.2f} to {max(seeds):.2f})" if len(seeds) > 1 else "")

    sigmas = sorted({row["sigma"] for row in rows if row["part"] == "long"})
    sizes = [{"size": size} for size in sorted({row["batch_size"] for row in rows})]
    long = columns("Long rounds, times as fast with drafts, by sigma", sizes, {
        "candidates": lambda row: number(row["size"]),
        **{f"{sigma:g}": lambda row, s=sigma: ranged(cell_of("long", row["size"], sigma=s)) for sigma in sigmas},
        "tail, 0.8": lambda row: shown(cell_of("long", row["size"], sigma=0.8), "tail_faster"),
        "simulated, 0.8": lambda row: shown(cell_of("long", row["size"], sigma=0.8), "faster_simulated"),
        "drafts of each, 0": lambda row: shown(cell_of("long", row["size"], sigma=0.0), "drafts_per_row"),
        "tokens of each, 0": lambda row: shown(cell_of("long", row["size"], sigma=0.0), "tokens_per_row"),
    })  # fmt: skip
    other = columns("Deferred prompts, another device, poor drafts", sizes, {
        "candidates": lambda row: number(row["size"]),
        "deferred, 0.8": lambda row: ranged(cell_of("deferred", row["size"], sigma=0.8, earlier_answer=6.0)),
        "its tail": lambda row: shown(cell_of("deferred", row["size"], sigma=0.8, earlier_answer=6.0), "tail_faster"),
        "cut answers": lambda row: ranged(cell_of("deferred", row["size"], sigma=0.8, earlier_answer=3.0)),
        "overhead, 0.8": lambda row: shown(cell_of("long", row["size"], "overhead", sigma=0.8)),
        "overhead, 0": lambda row: shown(cell_of("long", row["size"], "overhead", sigma=0.0)),
        "poor drafts": lambda row: number((cell_of("poor", row["size"]) or {}).get("faster"), 3),
        "poor, overhead": lambda row: number((cell_of("poor", row["size"], "overhead") or {}).get("faster"), 3),
    })  # fmt: skip
    slow = [(f"{part}, {device}", part, device) for part in PARTS if part.startswith("short") for device in SLOW_STEPS]
    short = columns("Rollouts of 64 to 128 tokens where a draft costs what a candidate does", sizes, {
        "candidates": lambda row: number(row["size"]),
        **{title: lambda row, p=part, d=device: ranged(cell_of(p, row["size"], d)) for title, part, device in slow},
    })  # fmt: skip
    its = result["summary"]
    said = [f"Largest loss of any run: {percent(its['largest_loss'], 1)} (allowed: {percent(its['allowed'])})."]
    for part, goal in its["goals"].items():
        said.append(f"{part}: {number(goal['median'], 2)} (goal {goal['goal']}: {goal['reached']} of {goal['cells']}).")
    return "\n\n".join([long, other, short, " ".join(said)])


if __name__ == "__main__":
    main()

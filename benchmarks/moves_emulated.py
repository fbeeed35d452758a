"""Groups that move between emulated ranks, at a paper's scale: rank time that moves free, beside the simulator.

Everything but the device is real: HTTP, vLLM's schedulers and data-parallel engine cores, and groups that are released
and adopted in the step loop. Each way runs one rollout of the same prompts and lengths on a fresh server:

stay         groups stay where they were placed
consolidate  "migration": "consolidate": ranks are emptied in the tail
scale-down   "scale_down": "auto": half of the ranks, between 20 and 50 % of the candidates

A rank is busy until the end of its last step, and free from then until the end of the rollout. --speed 0.25 makes every
step last four times as long, so that the host keeps up. Seconds are the device's. The simulator has the same lengths
and step costs. It models no host, and prefills a moved group in one go.

Run from the repository root: python -m benchmarks.moves_emulated
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import uvloop
from rich.console import Console

from benchmarks.common import publish, started
from benchmarks.emulated import (
    FIRST_SEED,
    EmulatedDataSet,
    Workload,
    emulated_server,
    record_of,
    title_of,
    workload_arguments,
    workload_of,
)
from benchmarks.tables import columns, number, percent
from vllm_rollout import AsyncRolloutClient
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.emulation.step_log import Summary, read_steps
from vllm_rollout.parts.moving.simulated import run_fleet
from vllm_rollout.process import counter, exit_on_sigterm
from vllm_rollout.simulator.race import Race
from vllm_rollout.simulator.rank import new_steps

WAYS: dict[str, dict[str, Any]] = {
    "stay": {},
    "consolidate": {"migration": "consolidate"},
    "scale-down": {"scale_down": "auto"},
}
"""Fields of a request, which are also fields of the simulator's machine."""


def main() -> None:
    parser = workload_arguments(__doc__, "moves_emulated", ranks=8, prompts=128, speed=0.25)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="ways to run (default: all)")
    arguments = parser.parse_args()
    exit_on_sigterm()
    its = workload_of(arguments)
    data = EmulatedDataSet(its, its.num_prompts)
    result = record_of(its, __doc__) | {"ways": {}}
    for way in arguments.ways:
        row = {"emulated": measure(its, data, way), "simulated": simulated(its, data, way)}
        result["ways"][way] = row
        seconds = [f"{row[where]['seconds']:.1f} s" for where in row]
        Console(stderr=True).print(f"{way}: {', '.join(seconds)}", highlight=False)
    publish(arguments, result, table)


def measure(its: Workload, data: EmulatedDataSet, way: str) -> dict[str, Any]:
    """Measure one way on a fresh server."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with started(emulated_server(its, folder)) as server:
            found = uvloop.run(_roll_out(its, data, server.url, WAYS[way]))
            metrics = httpx.get(f"{server.url}/metrics", timeout=30).text
        logs = [log.steps for log in read_steps(folder / "steps")]
    ends = [max(step.end for step in steps) for steps in logs]
    begin, end = min(step.start for steps in logs for step in steps), max(ends)
    ranks = [Summary.of(steps) for steps in logs]
    return {
        **found,
        "client_s": found["client_s"] * its.speed,
        "seconds": (end - begin) * its.speed,
        "freed_rank_s": sum(end - each for each in ends) * its.speed,
        "idle_share": sum(rank.idle_s for rank in ranks) / sum(rank.busy_s + rank.idle_s for rank in ranks),
        "prefilled_tokens": sum(rank.prefilled_tokens for rank in ranks),
        "move_seconds": _move_seconds(metrics),
    }


async def _roll_out(its: Workload, data: EmulatedDataSet, url: str, fields: dict[str, Any]) -> dict[str, Any]:
    prompts = [{"id": str(n), "prompt_token_ids": token_ids} for n, token_ids in enumerate(data.token_ids)]
    sampling = {"max_tokens": its.model.max_tokens, "seed": FIRST_SEED}
    async with AsyncRolloutClient(url) as client:
        started = time.perf_counter()
        answer = await client.rollout(
            prompts, its.group_size, sampling_params=sampling, include=[], timeout=7200.0, **fields
        )
        seconds = time.perf_counter() - started
        engines = await client.engines()
    return {
        "client_s": seconds,
        "generated_tokens": answer.usage.generated_tokens,
        "num_moves": sum(engine.num_moved_in for engine in engines),
        "freed": answer.freed and answer.freed.model_dump(),
    }


def simulated(its: Workload, data: EmulatedDataSet, way: str) -> dict[str, Any]:
    """The way in the simulator. Groups are placed in turn, as the server places them."""
    machine = replace(its.machine, **WAYS[way])
    plan = GroupPlan(its.group_size)
    races: list[list[Race]] = [[] for _ in range(its.num_ranks)]
    for number_of, prompt in enumerate(data.prompts):
        pool = data.candidates(prompt, 0, 0, its.group_size)
        race = Race(str(number_of), plan, pool, prompt.prompt_tokens, max_tokens=its.model.max_tokens)
        races[number_of % its.num_ranks].append(race)
    run = run_fleet(machine, [new_steps() for _ in races], races)
    return {
        "seconds": run.seconds,
        "freed_rank_s": sum(run.seconds - rank.seconds for rank in run.ranks),
        "num_moves": run.num_moves,
    }


def _move_seconds(metrics: str) -> float | None:
    """Mean seconds from the request for a group until the other rank has it, on the host's clock."""
    count = counter(metrics, "vllm_rollout:move_seconds_count")
    return counter(metrics, "vllm_rollout:move_seconds_sum") / count if count else None


def table(result: dict[str, Any]) -> str:
    ways, num_ranks = result["ways"], result["workload"]["ranks"]

    def times(row: dict[str, Any], where: str) -> str:
        return number(row[where]["seconds"] / ways["stay"][where]["seconds"], 3) if "stay" in ways else ""

    def freed(its: dict[str, Any]) -> str:
        return percent(its["freed_rank_s"] / num_ranks / its["seconds"], 0)

    def move_ms(its: dict[str, Any]) -> str:
        return number(1e3 * its["move_seconds"], 0) if its["move_seconds"] is not None else ""

    return columns(title_of(result), [row | {"way": way} for way, row in ways.items()], {
        "": lambda row: row["way"],
        "s": lambda row: number(row["emulated"]["seconds"], 1),
        "× staying": lambda row: times(row, "emulated"),
        "× simulated": lambda row: times(row, "simulated"),
        "simulator's error": lambda row: percent(row["simulated"]["seconds"] / row["emulated"]["seconds"] - 1, 1),
        "free share of rank time": lambda row: freed(row["emulated"]),
        "free, simulated": lambda row: freed(row["simulated"]),
        "moves": lambda row: number(row["emulated"]["num_moves"]),
        "moves, simulated": lambda row: number(row["simulated"]["num_moves"]),
        "ms per move": lambda row: move_ms(row["emulated"]),
        "idle": lambda row: percent(row["emulated"]["idle_share"], 1),
    })  # fmt: skip


if __name__ == "__main__":
    main()

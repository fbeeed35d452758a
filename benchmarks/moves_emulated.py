"""Groups that move between emulated ranks, at a paper's scale: what that frees, beside the simulator.

Everything but the device is the real thing: HTTP, vLLM's schedulers and data-parallel engine cores, groups that are
released and adopted in the step loop. One rollout of each way, on a fresh server, of the same prompts and lengths:

stay         groups stay where they were placed
consolidate  "migration": "consolidate": ranks are emptied in the tail
scale-down   "scale_down": "auto": half of the ranks, between 20 and 50 % of the candidates

A rank is busy until its last step is over; what it has left until the end of the rollout is free. Time is stretched
(--speed 0.25: every step lasts four times as long) as far as the host needs; seconds are the device's. The simulator
has the same lengths and step costs; it knows no host, and prefills what has moved in one go.

Run from the repository root: python -m benchmarks.moves_emulated
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import uvloop
from rich.console import Console

from benchmarks.common import ROOT, record_of_run, write_json
from benchmarks.rounds_emulated.workload import FIRST_SEED, EmulatedDataSet, Workload, emulated_server
from benchmarks.rounds_simulated.setup import GPU_SOURCE, MODEL_NAMES, MODEL_SOURCE, TAIL_SOURCE
from benchmarks.tables import grid, number, percent
from vllm_rollout.client.client import AsyncRolloutClient
from vllm_rollout.emulation.step_log import Summary, read_steps
from vllm_rollout.group.judge import Judge
from vllm_rollout.group.plan import GroupPlan
from vllm_rollout.process import exit_on_sigterm
from vllm_rollout.simulator.fleet import run_fleet
from vllm_rollout.simulator.race import Race

OUTPUT = ROOT / "benchmarks/results/moves_emulated.json"
WAYS: dict[str, dict[str, Any]] = {
    "stay": {},
    "consolidate": {"migration": "consolidate"},
    "scale-down": {"scale_down": "auto"},
}
"""Fields of a request, and of the simulator's machine."""


def main() -> None:
    arguments = _parse_arguments()
    exit_on_sigterm()
    console = Console(stderr=True)
    its = Workload(arguments.model, arguments.ranks, arguments.prompts, arguments.group_size, arguments.seed)
    data = EmulatedDataSet(its, its.prompts_per_round)
    result = record_of_run(
        seed=arguments.seed,
        workload={
            "conditions": __doc__, "model": its.model.described(), "ranks": its.num_ranks, "speed": arguments.speed,
            "prompts": its.prompts_per_round, "group_size": its.group_size, "device": its.device,
            "sources": [GPU_SOURCE, MODEL_SOURCE, TAIL_SOURCE],
        },
    )  # fmt: skip
    result["ways"] = {}
    for way in arguments.ways:
        row = {"emulated": measure(its, data, way, arguments.speed), "simulated": simulated(its, data, way)}
        result["ways"][way] = row
        console.print(
            f"{way}: {row['emulated']['seconds']:.1f} s, {row['simulated']['seconds']:.1f} s", highlight=False
        )
    write_json(arguments.output, result)
    print(table(result))


def measure(its: Workload, data: EmulatedDataSet, way: str, speed: float) -> dict[str, Any]:
    """One way on a fresh server."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with emulated_server(its, speed, folder) as server:
            server.wait_until_healthy(lambda seconds, line: None)
            found = uvloop.run(_roll_out(its, data, server.url, WAYS[way]))
            metrics = httpx.get(f"{server.url}/metrics", timeout=30).text
        logs = [log.steps for log in read_steps(folder / "steps")]
    ends = [max(step.end for step in steps) for steps in logs]
    begin, end = min(step.start for steps in logs for step in steps), max(ends)
    ranks = [Summary.of(steps) for steps in logs]
    return {
        **found,
        "client_s": found["client_s"] * speed,
        "seconds": (end - begin) * speed,
        "freed_rank_s": sum(end - each for each in ends) * speed,
        "idle_share": sum(rank.idle_s for rank in ranks) / sum(rank.busy_s + rank.idle_s for rank in ranks),
        "prefilled_tokens": sum(rank.prefilled_tokens for rank in ranks),
        "move_seconds": _move_seconds(metrics),
    }


async def _roll_out(its: Workload, data: EmulatedDataSet, url: str, fields: dict[str, Any]) -> dict[str, Any]:
    prompts = [{"id": str(n), "prompt_token_ids": token_ids} for n, token_ids in enumerate(data.token_ids)]
    sampling = {"max_tokens": its.max_tokens, "seed": FIRST_SEED}
    async with AsyncRolloutClient(url) as client:
        started = time.perf_counter()
        answer = await client.rollout(
            prompts, its.group_size, sampling=sampling, return_logprobs=False, timeout=7200.0, **fields
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
    """The same, in the simulator; groups are placed as the server places them, in turn."""
    machine = replace(its.machine, **WAYS[way])
    plan = GroupPlan(its.group_size)
    races: list[list[Race]] = [[] for _ in range(its.num_ranks)]
    for number_of, prompt in enumerate(data.prompts):
        pool = data.candidates(prompt, 0, 0, its.group_size)
        race = Race(str(number_of), plan, pool, prompt.prompt_tokens, None, None, None, its.max_tokens)
        races[number_of % its.num_ranks].append(race)
    run = run_fleet(machine, [Judge() for _ in races], races)
    return {
        "seconds": run.seconds,
        "freed_rank_s": sum(run.seconds - rank.seconds for rank in run.ranks),
        "num_moves": run.num_moves,
    }


def _move_seconds(metrics: str) -> float | None:
    """Mean from asking for a group until the other rank has it, in real seconds."""
    values = {
        line.split()[0]: float(line.split()[1])
        for line in metrics.splitlines()
        if line.startswith("vllm_rollout:move_seconds_")
    }
    count = values.get("vllm_rollout:move_seconds_count", 0.0)
    return values["vllm_rollout:move_seconds_sum"] / count if count else None


def table(result: dict[str, Any]) -> str:
    rows = []
    stay = result["ways"].get("stay")
    for way, row in result["ways"].items():
        emulated, simulated = row["emulated"], row["simulated"]
        num_ranks = result["workload"]["ranks"]
        rows.append(
            [
                way, number(emulated["seconds"], 1),
                number(emulated["seconds"] / stay["emulated"]["seconds"], 3) if stay else "",
                number(simulated["seconds"] / stay["simulated"]["seconds"], 3) if stay else "",
                percent(simulated["seconds"] / emulated["seconds"] - 1, 1),
                percent(emulated["freed_rank_s"] / num_ranks / emulated["seconds"], 0),
                percent(simulated["freed_rank_s"] / num_ranks / simulated["seconds"], 0),
                number(emulated["num_moves"]), number(simulated["num_moves"]),
                "" if emulated["move_seconds"] is None else number(1e3 * emulated["move_seconds"], 0),
                percent(emulated["idle_share"], 1),
            ]
        )  # fmt: skip
    its = result["workload"]
    title = (
        f"{its['model']['title']}, {its['prompts']} x {its['group_size']}, {its['ranks']} ranks, speed {its['speed']}"
    )
    header = [
        "", "s", "× staying", "simulated", "simulator's error", "free share of rank time", "simulated", "moves",
        "simulated", "ms per move", "idle",
    ]  # fmt: skip
    return grid(title, header, rows)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.moves_emulated",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model", choices=MODEL_NAMES, default=MODEL_NAMES[0], help="step costs, lengths and cap (default %(default)s)"
    )
    add("--ranks", type=int, default=8, help="data-parallel engines (default %(default)s)")
    add("--prompts", type=int, default=128, help="default %(default)s")
    add("--group-size", type=int, default=8, help="default %(default)s")
    add("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="default: all")
    add("--speed", type=float, default=0.25, help="--emulate-speed of the server (default %(default)s)")
    add("--seed", type=int, default=3, help="default %(default)s")
    add("--output", type=Path, default=OUTPUT)
    return parser.parse_args()


if __name__ == "__main__":
    main()

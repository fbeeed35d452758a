"""What rewards cost who asks for none: `python -m benchmarks.rewards.unasked --before FOLDER`.

Two servers on an emulated device that is faster than the host: this checkout, and one from before servers graded, in
another folder. The same rollouts in turns, without a reward; CPU seconds of all processes of a server, of its API
process alone, and seconds on the clock. A ratio is taken within a repeat, this checkout's over the other's; the first
repeat warms up. CPU seconds tell more than the clock where the host has other work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import uvloop
from rich.console import Console

from benchmarks.common import ROOT, arguments_of, median, percentile, publish, ratios, record_of_run
from benchmarks.tables import columns, number
from vllm_rollout.client.client import AsyncRolloutClient
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.process import ServerProcess, exit_on_sigterm, free_port, log_folder, server_environment

DEVICE = {"step": {"ms": 0.1, "ms_per_request": 0.0}, "lengths": {"log_normal": {"mean": 48, "sigma": 0.6}}}
NUM_ROLLOUTS, AT_ONCE, PROMPTS, GROUP_SIZE, REDUNDANCY, MAX_TOKENS = 48, 8, 4, 8, 2, 128
MEASURES = {
    "cpu_s": "CPU seconds, all processes", "api_cpu_s": "CPU seconds, API process", "wall_s": "seconds",
}  # fmt: skip


def main() -> None:
    parser = arguments_of(__doc__, "rewards_unasked", seed=3, repeats=20)
    parser.add_argument("--before", type=Path, required=True, help="a checkout from before servers graded")
    arguments = parser.parse_args()
    exit_on_sigterm()
    checkouts = {"before": arguments.before.resolve(), "now": ROOT}
    command = ["git", "-C", str(checkouts["before"]), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    workload = {
        "conditions": __doc__, "before": commit, "device": DEVICE, "rollouts": NUM_ROLLOUTS, "at_once": AT_ONCE,
        "prompts": PROMPTS, "group_size": GROUP_SIZE, "redundancy": REDUNDANCY, "max_tokens": MAX_TOKENS,
    }  # fmt: skip
    begun = record_of_run(seed=arguments.seed, workload=workload)
    begun["command"] = begun["command"].replace(str(arguments.before), "FOLDER")
    repeats = measure(checkouts, arguments)
    publish(arguments, {**begun, "repeats": repeats, "ratios": ratios_of(repeats)}, tables)


def measure(checkouts: dict[str, Path], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    with log_folder() as folder, ExitStack() as stack:
        device = folder / "device.json"
        device.write_text(json.dumps({**DEVICE, "seed": arguments.seed}))
        servers = {
            name: stack.enter_context(server(checkout, device, folder / f"{name}.log"))
            for name, checkout in checkouts.items()
        }
        for each in servers.values():
            each.wait_until_healthy(lambda seconds, line: None)
        turns, rows = list(servers), []
        for repeat in range(arguments.repeats + 1):
            turns.reverse()
            row = {name: uvloop.run(one_turn(servers[name], arguments.seed + 10_000 * repeat)) for name in turns}
            if repeat:
                rows.append(row)
            Console(stderr=True).print(f"repeat {repeat} of {arguments.repeats}", highlight=False)
    return rows


def server(checkout: Path, device: Path, log: Path) -> ServerProcess:
    model = resolve(DEFAULT_MODEL)
    flags = ["--max-model-len", "1024", "--max-num-seqs", "512", "--emulate", str(device)]
    # -P: a module comes from PYTHONPATH, not from the folder in which this runs.
    command = [sys.executable, "-P", "-m", "vllm_rollout.cli", "serve", model, *flags, "--disable-uvicorn-access-log"]
    environment = server_environment(model) | {"PYTHONPATH": str(checkout)}
    return ServerProcess(command, free_port(), environment, log)


async def one_turn(server: ServerProcess, seed: int) -> dict[str, float]:
    """What one server needs for all rollouts."""
    prompts = [{"id": str(i), "prompt_token_ids": [100 + i, 200 + i, 300 + i]} for i in range(PROMPTS)]
    free = asyncio.Semaphore(AT_ONCE)
    api = psutil.Process(server.pid)
    processes = [api, *api.children(recursive=True)]
    before, api_before, began = cpu_s(processes), cpu_s([api]), time.perf_counter()
    async with AsyncRolloutClient(server.url) as client:

        async def rollout(number: int) -> None:
            async with free:
                sampling = {"max_tokens": MAX_TOKENS, "seed": seed + 100 * number}
                await client.rollout(prompts, GROUP_SIZE, REDUNDANCY, sampling=sampling)

        await asyncio.gather(*map(rollout, range(NUM_ROLLOUTS)))
    wall_s = time.perf_counter() - began
    return {"cpu_s": cpu_s(processes) - before, "api_cpu_s": cpu_s([api]) - api_before, "wall_s": wall_s}


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def ratios_of(repeats: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    found = {}
    for key in MEASURES:
        values = ratios(*([row[name][key] for row in repeats] for name in ("now", "before")))
        found[key] = {
            "before": median(row["before"][key] for row in repeats),
            "now": median(row["now"][key] for row in repeats),
            "median": median(values), "p25": percentile(values, 25), "p75": percentile(values, 75),
        }  # fmt: skip
    return found


def tables(result: dict[str, Any]) -> str:
    rows = [{"what": MEASURES[key], **ratio} for key, ratio in result["ratios"].items()]
    return columns("Rollouts without a reward", rows, {
        "a turn": lambda row: row["what"],
        "before": lambda row: number(row["before"], 2),
        "now": lambda row: number(row["now"], 2),
        "now / before": lambda row: number(row["median"]),
        "quartiles": lambda row: f"{row['p25']:.3f} to {row['p75']:.3f}",
    })  # fmt: skip


if __name__ == "__main__":
    os.chdir(ROOT)
    main()

"""What viewers of the page cost: `python -m benchmarks.watching`.

One server on an emulated device, the same rollout in turns, without a viewer and with ten of them, each a connection
that reads all it is told. CPU seconds of the engine core and of the API process, with viewers over without, within a
repeat; the first repeat warms up. CPU seconds tell more than the clock where the host has other work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from typing import Any

import httpx
import psutil
import uvloop
from rich.console import Console

from benchmarks.common import arguments_of, median, percentile, publish, ratios, record_of_run, server_process
from benchmarks.tables import columns, number
from vllm_rollout.client.client import RolloutClient
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.process import ServerProcess, exit_on_sigterm, log_folder

DEVICE = {"step": {"ms": 30.0, "ms_per_request": 0.0}, "lengths": {"log_normal": {"mean": 300, "sigma": 0.8}}}
NUM_VIEWERS, PROMPTS, GROUP_SIZE, REDUNDANCY, MAX_TOKENS = 10, 128, 8, 8, 1024
PROCESSES = {"engine": "engine core", "api": "API process"}


def main() -> None:
    parser = arguments_of(__doc__, "watching", seed=3, repeats=5)
    parser.add_argument("--view", metavar="URL", help=argparse.SUPPRESS)  # what the viewers' process is started with
    arguments = parser.parse_args()
    if arguments.view:
        uvloop.run(look(arguments.view))
        return
    exit_on_sigterm()
    workload = {
        "conditions": __doc__, "device": DEVICE, "viewers": NUM_VIEWERS, "prompts": PROMPTS, "group_size": GROUP_SIZE,
        "redundancy": REDUNDANCY, "max_tokens": MAX_TOKENS,
    }  # fmt: skip
    begun = record_of_run(seed=arguments.seed, workload=workload)
    repeats = measure(arguments)
    publish(arguments, {**begun, "repeats": repeats, "ratios": ratios_of(repeats)}, tables)


async def look(url: str) -> None:
    """All viewers, until the process is ended."""

    async def one(http: httpx.AsyncClient) -> None:
        async with http.stream("GET", f"{url}/v1/rollouts/watch") as answer:
            async for _ in answer.aiter_bytes():
                pass

    async with httpx.AsyncClient(timeout=None) as http:
        await asyncio.gather(*(one(http) for _ in range(NUM_VIEWERS)))


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    with log_folder() as folder:
        device = folder / "device.json"
        device.write_text(json.dumps({**DEVICE, "seed": arguments.seed}))
        flags = ["--max-model-len", "1536", "--max-num-seqs", "2048", "--emulate", str(device)]
        flags.append("--disable-uvicorn-access-log")
        rows: list[dict[str, Any]] = []
        with server_process("rollout", resolve(DEFAULT_MODEL), flags, folder / "server.log") as server:
            server.wait_until_healthy(lambda seconds, line: None)
            turns = [0, NUM_VIEWERS]
            for repeat in range(arguments.repeats + 1):
                turns.reverse()
                row = {str(count): one_turn(server, count, arguments.seed) for count in turns}
                if repeat:
                    rows.append(row)
                Console(stderr=True).print(f"repeat {repeat} of {arguments.repeats}", highlight=False)
    return rows


def one_turn(server: ServerProcess, num_viewers: int, seed: int) -> dict[str, float]:
    """CPU seconds of each process for one rollout."""
    api = psutil.Process(server.pid)
    engine = next(child for child in api.children(recursive=True) if "EngineCore" in child.name())
    processes = {"engine": engine, "api": api}
    prompts = [{"id": str(i), "prompt_token_ids": [100 + i, 200 + i, 300 + i]} for i in range(PROMPTS)]
    command = [sys.executable, "-m", "benchmarks.watching", "--view", server.url]
    viewers = subprocess.Popen(command) if num_viewers else None
    try:
        with RolloutClient(server.url) as client:
            client.rollout(prompts[:1], 1, sampling={"max_tokens": 64, "seed": seed})  # while the viewers come
            before = {name: cpu_s(process) for name, process in processes.items()}
            client.rollout(prompts, GROUP_SIZE, REDUNDANCY, sampling={"max_tokens": MAX_TOKENS, "seed": seed})
            return {name: cpu_s(process) - before[name] for name, process in processes.items()}
    finally:
        if viewers is not None:
            viewers.terminate()
            viewers.wait()


def cpu_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def ratios_of(repeats: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    found = {}
    for key in PROCESSES:
        without, watched = ([row[count][key] for row in repeats] for count in ("0", str(NUM_VIEWERS)))
        values = ratios(watched, without)
        found[key] = {
            "without": median(without), "watched": median(watched), "median": median(values),
            "p25": percentile(values, 25), "p75": percentile(values, 75),
        }  # fmt: skip
    return found


def tables(result: dict[str, Any]) -> str:
    rows = [{"what": PROCESSES[key], **ratio} for key, ratio in result["ratios"].items()]
    return columns(f"CPU seconds of a rollout of {PROMPTS * (GROUP_SIZE + REDUNDANCY):,} candidates", rows, {
        "process": lambda row: row["what"],
        "no viewer": lambda row: number(row["without"], 2),
        f"{NUM_VIEWERS} viewers": lambda row: number(row["watched"], 2),
        "ratio": lambda row: number(row["median"], 3),
        "quartiles": lambda row: f"{row['p25']:.3f} to {row['p75']:.3f}",
    })  # fmt: skip


if __name__ == "__main__":
    main()

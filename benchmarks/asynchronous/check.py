"""Holds the virtual clock against an emulated server: the same lengths, costs and groups, waiting and raced.

    python -m benchmarks.asynchronous.check runs/asynchronous

The server is real but for its device. The first steps of the pilot are rolled out, LONGER times as long as sampled.
FOLDER gets `check.json`, which the report shows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.asynchronous.arms import ARMS, GROUP_SIZE, Arm
from benchmarks.asynchronous.clock import CONTEXT_S, MAX_TOKENS, SLOTS, WORLDS, Clock
from benchmarks.asynchronous.pilot import NUM_PROMPT, Lengths, NoPolicy
from benchmarks.asynchronous.train import Training
from benchmarks.common import emulated_process, started, write_json
from vllm_rollout import AsyncRolloutClient

LONGER, NUM_ROLLOUTS, SPEED = 4, 2, 0.2
WORLD = replace(WORLDS["quarter"], scale=LONGER, transfer_s=0.0)
MILLISECONDS = {"ms": WORLD.step_s, "ms_per_request": WORLD.candidate_s, "ms_per_context_token": CONTEXT_S}
DEVICE = {"step": {name: 1e3 * seconds for name, seconds in MILLISECONDS.items()}, "kv_tokens": 4_000_000}


def clock_s(arm: Arm, groups: Sequence[Sequence[int]]) -> float:
    """Seconds of a rollout of these lengths on the virtual clock."""
    clock = Clock(WORLD, trained_tokens_s=inf)
    lines = Training(arm, clock, Lengths(cycle(groups)), NoPolicy()).go(limit_s=1e4)
    return next(line["rollout_s"] for line in lines if line["kind"] == "step")


async def server_s(arm: Arm, groups: Sequence[Sequence[int]], client: AsyncRolloutClient) -> float:
    """Seconds of the same rollout on the emulated server, with a request per group."""
    began = time.perf_counter()
    await asyncio.gather(*(ask(arm, lengths, place, client) for place, lengths in enumerate(groups)))
    return (time.perf_counter() - began) * SPEED


async def ask(arm: Arm, lengths: Sequence[int], place: int, client: AsyncRolloutClient) -> None:
    forced = {"emulate_lengths": [length * LONGER for length in lengths[: arm.plan.num_candidates]]}
    prompt = {"id": str(place), "prompt_token_ids": [100 + place] * NUM_PROMPT * LONGER}
    sampling = {"max_tokens": MAX_TOKENS * LONGER, "extra_args": forced}
    await client.rollout([prompt], GROUP_SIZE, redundancy=arm.plan.redundancy, sampling_params=sampling, include=[])


async def compare(groups: Sequence[Sequence[Sequence[int]]], url: str) -> dict[str, Any]:
    found = dict[str, Any]()
    async with AsyncRolloutClient(url) as client:
        for name in ("wait", "race"):
            arm = ARMS[name]
            await server_s(arm, groups[0], client)  # warms up
            rows = [{"clock_s": clock_s(arm, each), "server_s": await server_s(arm, each, client)} for each in groups]
            found[name] = {"rollouts": rows, "ratio": fmean(row["clock_s"] / row["server_s"] for row in rows)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder of benchmarks.asynchronous.run, with its pilot")
    folder = parser.parse_args().folder
    groups = json.loads((folder / "pilot.json").read_text())["lengths"][:NUM_ROLLOUTS]
    flags = ["--max-model-len", "4096", "--max-num-seqs", str(SLOTS), "--rollout-emulate-speed", str(SPEED)]
    with tempfile.TemporaryDirectory() as logs, started(emulated_process(DEVICE, flags, Path(logs))) as server:
        found = asyncio.run(compare(groups, server.url))
    write_json(folder / "check.json", found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""Kills ranks of a server on emulated devices at random moments, one after the other until one is left.

Meanwhile groups move between ranks. The program counts what the clients lose: every group must come back whole, and no
token twice.

    python -m benchmarks.kills.ranks
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import ROOT, arguments_of, emulated_process, record_of_run, write_json
from benchmarks.kills.rank_readers import Mover, Reader
from vllm_rollout.process import ServerProcess

MODEL = "tiny-random"
EMULATED = {
    "step": {"ms": 5.0, "ms_per_request": 0.0},
    "lengths": {"log_normal": {"mean": 200, "sigma": 0.8}},
    "seed": 0,
}
MAX_TOKENS = 2000
NUM_READERS = 4
START_TIMEOUT_S = 240.0
MIN_PAUSE_S, MAX_PAUSE_S = 0.2, 1.5
"""Seconds between two kills."""
RANKS = "EngineCor"
"""Name of the processes of vLLM's ranks, as Linux truncates it."""


def main() -> None:
    parser = arguments_of(__doc__, "kills.ranks")
    parser.set_defaults(output=ROOT / "benchmarks/results/kills_ranks.json")
    parser.add_argument("--kills", type=int, default=200, help="number of ranks to kill, over all servers")
    parser.add_argument("--ranks", type=int, default=8, help="ranks of each server")
    parser.add_argument("--api-servers", type=int, default=1)
    args = parser.parse_args()
    workload = {"model": MODEL, "emulated": EMULATED, "ranks": args.ranks, "api_servers": args.api_servers}
    record = record_of_run(seed=args.seed, workload={**workload, "clients": NUM_READERS, "groups_per_request": 4})
    counts: Counter[str] = Counter()
    problems: list[str] = []
    while counts["kills"] < args.kills:
        life = live(args.ranks, args.api_servers, args.seed + counts["servers"], args.kills - counts["kills"])
        counts += life.counts
        counts["servers"] += 1
        problems += life.problems
        print(f"{counts['kills']} kills, {counts['groups_complete']} groups, {len(problems)} problems", flush=True)
    said = {"counts": dict(sorted(counts.items())), "num_problems": len(problems), "problems": problems[:20]}
    write_json(args.output, {**record, **said})
    print(json.dumps(said["counts"], indent=1))
    sys.exit(1 if problems else 0)


@dataclass(slots=True)
class Life:
    """Counts and problems of one server's clients."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def live(num_ranks: int, api_servers: int, seed: int, max_kills: int) -> Life:
    """Run one server until one rank is left or `max_kills` ranks are killed."""
    life, chance = Life(), random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(NUM_READERS + 1) as pool:
        server = start(Path(folder), num_ranks, api_servers)
        with server:
            server.wait_until_healthy(lambda seconds, line: None, START_TIMEOUT_S)
            stop_reading, stop_moving = threading.Event(), threading.Event()
            readers = [Reader(server.url, at, stop_reading, MAX_TOKENS) for at in range(NUM_READERS)]
            mover = Mover(server.url, seed, num_ranks, stop_moving)
            reading = [pool.submit(reader.read) for reader in readers]
            moving = pool.submit(mover.move)
            ranks = rank_processes(server.pid)
            assert len(ranks) == num_ranks, f"{len(ranks)} of {num_ranks} ranks run"
            chance.shuffle(ranks)
            for rank in ranks[: min(num_ranks - 1, max_kills)]:
                time.sleep(chance.uniform(MIN_PAUSE_S, MAX_PAUSE_S))
                os.kill(rank.pid, signal.SIGKILL)
                life.counts["kills"] += 1
            time.sleep(MAX_PAUSE_S)
            stop_moving.set()
            stop_reading.set()
            for work in (moving, *reading):
                work.result()
    for client in (mover, *readers):
        life.counts += client.counts
        life.problems += client.problems
    life.problems += [f"a client stopped: {reader.said}" for reader in readers if reader.said != "stopped"]
    return life


def start(folder: Path, num_ranks: int, api_servers: int) -> ServerProcess:
    flags = ["--max-model-len", "4096", "--max-num-seqs", "64"]
    flags += ["--data-parallel-size", str(num_ranks), "--api-server-count", str(api_servers)]
    return emulated_process(EMULATED, flags, folder, MODEL, OMP_NUM_THREADS="1")


def rank_processes(pid: int) -> list[Any]:
    """Rank processes of the server with that process id, by rank."""
    processes = psutil.Process(pid).children(recursive=True)
    ranks = [each for each in processes if RANKS in " ".join(each.cmdline())]
    return sorted(ranks, key=lambda each: each.cmdline())


if __name__ == "__main__":
    main()

"""What consolidating a heavy tail on one of two ranks frees, and what its moves cost: `python -m benchmarks.two_ranks`.

A step is one rollout of single candidates over the two data-parallel ranks of a server on a CPU, a core each. Lengths
are forced, by a request per prompt with `ignore_eos` and `max_tokens`: quantiles of a log-normal distribution with a
cap, in an order of chance; candidates are placed in turn. Five ways take turns, who begins rotates:

off                groups stay where they were placed
recompute          "migration": "consolidate", and the target computes what comes again (--rollout-move-kv off)
kv                 the same, and KV blocks come along (--rollout-move-kv auto)
drained-recompute  no migration; when four candidates are left, the client drains the rank that has fewer
drained-kv         the same, and KV blocks come along

The first three are what the rule does, the last two the same move with and without KV, whether it pays or not. Two
servers, one with KV and one without, are alive all the time (one is idle); `off` runs on the one and the other in turn.
The order of lengths and the seeds are a repeat's own, the same in every way. The profile is made first unless there is
one, by one engine alone on one core; it should be of the same hour, and of a quiet one.

Measured by the client: every candidate streams token by token, and `GET /v1/engines` is asked every 50 ms. A rank is
free from when it is first seen empty for good until the end of the step. A candidate loses what pauses around a move
are longer than its usual ones (the median of ten), if they are 1.5 times as long; the price of a consolidation is what
the median candidate that was on the target loses, against `group/load.py::price_s` with the profile and what transfers
have cost until then. `moving_s` is what both engine cores spend on moves between two steps, by their own clocks. Ratios
are taken within a repeat, then their median.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from math import exp, log
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, get_args

from rich.console import Console

from benchmarks.common import ROOT, record_of_run, server_process, write_json
from benchmarks.two_ranks.picture import draw
from benchmarks.two_ranks.records import LOOK_S, Step, consolidations, decoding_lost_share, undisturbed_lost_s
from benchmarks.two_ranks.summary import summarize, tables
from benchmarks.two_ranks.watch import Watch
from vllm_rollout.client.client import AsyncRolloutClient
from vllm_rollout.demo.rounds.prompts import LONG, SHORT
from vllm_rollout.group.cost import CostModel
from vllm_rollout.group.fields import Migration
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.process import ServerProcess, exit_on_sigterm, log_folder, runs_on_cpu, server_environment
from vllm_rollout.profiling.profile_file import Profile

OUTPUT = ROOT / "benchmarks/results/two_ranks.json"
PICTURE = ROOT / "docs/two_ranks.png"
PROFILE = ROOT / "benchmarks/results/two_ranks_profile.json"
Server = Literal["recompute", "kv"]
Way = Literal["off", "recompute", "kv", "drained-recompute", "drained-kv"]
WAYS: tuple[Way, ...] = get_args(Way)
MOVE_KV: dict[Server, str] = {"recompute": "off", "kv": "auto"}
BLOCK_SIZE = 32
NUM_LEFT_AT_DRAIN = 4
SERVER_OF: dict[Way, Server] = {
    "recompute": "recompute", "kv": "kv", "drained-recompute": "recompute", "drained-kv": "kv",
}  # fmt: skip


class Bench(NamedTuple):
    arguments: argparse.Namespace
    cost: CostModel
    servers: dict[Server, ServerProcess]
    console: Console


def main() -> None:
    arguments = _parse_arguments()
    exit_on_sigterm()
    console = Console(stderr=True)
    its = vars(arguments)
    sizes = {name: its[name] for name in ("model", "prompts", "median", "sigma", "max_tokens", "repeats")}
    begun = record_of_run(seed=arguments.seed, workload={"conditions": __doc__, **sizes, "flags": _flags(arguments)})
    if not arguments.profile.exists():
        _make_profile(arguments)
    cost = Profile.read(arguments.profile).cost()
    with ExitStack() as stack:
        folder = stack.enter_context(log_folder())
        servers = {name: stack.enter_context(_server(name, arguments, folder)) for name in get_args(Server)}
        for server in servers.values():
            server.wait_until_healthy(lambda seconds, line: None)
        rows = asyncio.run(_measure(Bench(arguments, cost, servers, console)))
    result = {**begun, "ways": summarize(rows), "steps": rows}
    write_json(arguments.output, result)
    draw(result, arguments.picture)
    print(tables(result))


def _flags(arguments: argparse.Namespace) -> list[str]:
    """Of an engine: those of the profile, too."""
    flags = ["--dtype", "float32", "--max-num-seqs", str(arguments.prompts), "--max-model-len", "1024"]
    flags += ["--max-num-batched-tokens", "8192", "--block-size", str(BLOCK_SIZE)]
    return [*flags, "--enforce-eager"] if runs_on_cpu() else flags


def _make_profile(arguments: argparse.Namespace) -> None:
    """Of this machine, now."""
    environment = server_environment(resolve(arguments.model)) | _on_cores("0")
    options = ["--output", str(arguments.profile), "--restart", "--batch-sizes", "1,2,3,4,6,8,12,16"]
    options += ["--contexts", "64,256", "--steps", "16", "--", *_flags(arguments)]
    subprocess.run(
        [sys.executable, "-m", "vllm_rollout.cli", "profile", arguments.model, *options],
        env=environment, check=True, stdout=sys.stderr,
    )  # fmt: skip


def _server(name: Server, arguments: argparse.Namespace, folder: Path) -> ServerProcess:
    flags = ["--data-parallel-size", "2", "--api-server-count", "1", "--disable-uvicorn-access-log"]
    flags += ["--rollout-profile", str(arguments.profile), "--rollout-move-kv", MOVE_KV[name], *_flags(arguments)]
    return server_process("rollout", resolve(arguments.model), flags, folder / f"{name}.log", **_on_cores("0|1"))


def _on_cores(cores: str) -> dict[str, str]:
    return {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "1"} if runs_on_cpu() else {}


async def _measure(bench: Bench) -> list[dict[str, Any]]:
    rows = []
    await asyncio.gather(*(_warm_up(server, bench.arguments) for server in bench.servers.values()))
    for repeat in range(bench.arguments.repeats):
        said: dict[Way, Step] = {}
        start = repeat % len(WAYS)
        for way in (*WAYS[start:], *WAYS[:start]):
            name = SERVER_OF.get(way, get_args(Server)[repeat % 2])
            said[way] = await _step(bench, bench.servers[name], way, repeat)
            rows.append({"way": way, "repeat": repeat, "server": name, **_row(said[way], bench.cost)})
            told = {key: round(rows[-1][key], 3) for key in ("seconds", "freed_rank_s", "num_moves")}
            bench.console.print(f"{repeat} {way} {told}", highlight=False)
        for row in rows[-len(WAYS) :]:
            own, stayed = said[row["way"]].token_ids, said["off"].token_ids
            row["num_other_answers"] = sum(own[candidate] != stayed[candidate] for candidate in stayed)
    return rows


async def _step(bench: Bench, server: ServerProcess, way: Way, repeat: int) -> Step:
    requests = _requests(bench.arguments, repeat, "consolidate" if way in get_args(Server) else "off")
    drain_at = NUM_LEFT_AT_DRAIN if way.startswith("drained") else None
    async with AsyncRolloutClient(server.url) as client:
        return await Watch(client, BLOCK_SIZE).step(server.log, requests, drain_at)


def _requests(arguments: argparse.Namespace, repeat: int, migration: Migration) -> list[dict[str, Any]]:
    """The same for a repeat, in every way."""
    chance = random.Random(arguments.seed + 1000 * repeat)
    lengths = _lengths(arguments)
    chance.shuffle(lengths)
    requests = []
    for number, (question, length) in enumerate(zip((*SHORT, *LONG), lengths, strict=False)):
        prompt = {"id": f"{repeat}-{number}", "messages": [{"role": "user", "content": question}]}
        sampling = {"temperature": 1.0, "max_tokens": length, "ignore_eos": True, "seed": chance.randrange(1 << 30)}
        requests.append(
            {
                "prompts": [prompt],
                "group_size": 1,
                "sampling": sampling,
                "migration": migration,
                "return_logprobs": False,
            }
        )
    return requests


def _lengths(arguments: argparse.Namespace) -> list[int]:
    normal, num = NormalDist(log(arguments.median), arguments.sigma), arguments.prompts
    return [min(arguments.max_tokens, max(2, round(exp(normal.inv_cdf((n + 0.5) / num))))) for n in range(num)]


async def _warm_up(server: ServerProcess, arguments: argparse.Namespace) -> None:
    """A step with moves in both directions: lengths and transfers are known to the first one that counts, too."""
    requests = _requests(arguments, -1, "off")
    async with AsyncRolloutClient(server.url) as client:
        rollouts = [asyncio.create_task(client.rollout(**request)) for request in requests]
        while not all(engine.num_running for engine in await client.engines()):
            await asyncio.sleep(LOOK_S)
        for rank in (0, 1):
            await client.drain(rank)
            await client.restore(rank)
        await asyncio.gather(*rollouts)


def _row(step: Step, cost: CostModel) -> dict[str, Any]:
    return {
        "load_average_1min": round(os.getloadavg()[0], 2),
        "seconds": step.seconds,
        "busy_s": step.busy_s,
        "freed_rank_s": step.freed_rank_s,
        "num_moves": len(step.moved),
        "longest_move_s": max((group.seconds for group in step.moved), default=0.0),
        "moving_s": step.moving_s,
        "kv_s_per_token": [transfer and transfer.s_per_token for transfer in step.looks[-1].transfers],
        "decoding_lost_share": decoding_lost_share(step),
        "undisturbed_lost_s": None if step.moved else undisturbed_lost_s(step),
        "consolidations": [asdict(found) for found in consolidations(step, cost)],
        "lengths": {"/".join(map(str, candidate)): len(ids) for candidate, ids in sorted(step.token_ids.items())},
    }


def _parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.two_ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="default %(default)s")
    add("--prompts", type=int, default=16, help="of a step, one candidate each (default %(default)s)")
    add("--median", type=float, default=40, help="of lengths, in tokens (default %(default)s)")
    add("--sigma", type=float, default=1.1, help="deviation of log lengths (default %(default)s)")
    add("--max-tokens", type=int, default=256, help="cap of lengths (default %(default)s)")
    add("--repeats", type=int, default=5, help="of every way (default %(default)s)")
    add("--seed", type=int, default=0, help="repeat r has this + 1000 r (default %(default)s)")
    add("--profile", type=Path, default=PROFILE, help="made there if there is none (default %(default)s)")
    add("--output", type=Path, default=OUTPUT)
    add("--picture", type=Path, default=PICTURE)
    return parser.parse_args(given)

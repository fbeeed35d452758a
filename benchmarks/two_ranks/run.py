"""What consolidating a heavy tail on one of two ranks frees, and what its moves cost: `python -m benchmarks.two_ranks`.

A step is one rollout over the two data-parallel ranks of a server on a CPU, a core each; lengths are the model's own
(temperature 1, seeded): most prompts are answered shortly, two in ten ask for a long answer, and some candidates ramble
up to the cap. Three ways take turns, who begins rotates:

off        groups stay where they were placed
recompute  "migration": "consolidate", and the target computes what comes again (--rollout-move-kv off)
kv         the same, and KV blocks come along (--rollout-move-kv auto)

`recompute` and `kv` have a server each, both alive all the time (one is idle); `off` runs on the one and the other in
turn. Prompts and seeds are a repeat's own, the same in every way; prompts keep their ids, so each server learns their
lengths. The profile is made first, by one engine alone on one core, in the same minutes.

Measured by the client: every candidate streams token by token, and `GET /v1/engines` is asked every 50 ms. A rank is
free from when it is first seen empty for good until the end of the step. A candidate loses what pauses around a move
are longer than its usual ones (the median of ten), if they are 1.5 times as long; the price of a consolidation is what
the median sibling on the target loses, against `group/load.py::price_s` with the profile and what transfers have cost
until then. `moving_s` is what both engine cores spend on moves between two steps, by their own clocks. Ratios are taken
within a repeat, then their median.
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
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from rich.console import Console

from benchmarks.common import ROOT, record_of_run, server_process, write_json
from benchmarks.two_ranks.records import LOOK_S, Step, consolidations, decoding_lost_share
from benchmarks.two_ranks.summary import summarize, tables
from benchmarks.two_ranks.watch import watched
from vllm_rollout.client.client import AsyncRolloutClient
from vllm_rollout.demo.rounds.prompts import LONG, SHORT
from vllm_rollout.group.cost import CostModel
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.process import ServerProcess, exit_on_sigterm, log_folder, runs_on_cpu, server_environment
from vllm_rollout.profiling.profile_file import Profile

OUTPUT = ROOT / "benchmarks/results/two_ranks.json"
PROFILE = ROOT / "benchmarks/results/two_ranks_profile.json"
Server = Literal["recompute", "kv"]
Way = Literal["off", "recompute", "kv"]
WAYS: tuple[Way, ...] = get_args(Way)
MOVE_KV: dict[Server, str] = {"recompute": "off", "kv": "auto"}
BLOCK_SIZE = 32
WARM_UP_TOKENS = 48


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
    sizes = {name: its[name] for name in ("model", "short", "long", "group_size", "max_tokens", "repeats")}
    begun = record_of_run(seed=arguments.seed, workload={"conditions": __doc__, **sizes, "flags": _flags(arguments)})
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
    print(tables(result))


def _flags(arguments: argparse.Namespace) -> list[str]:
    """Of an engine: those of the profile, too."""
    num_candidates = (arguments.short + arguments.long) * arguments.group_size
    flags = ["--dtype", "float32", "--max-num-seqs", str(num_candidates), "--max-model-len", "1024"]
    flags += ["--max-num-batched-tokens", "8192", "--block-size", str(BLOCK_SIZE)]
    return [*flags, "--enforce-eager"] if runs_on_cpu() else flags


def _make_profile(arguments: argparse.Namespace) -> None:
    """Of this machine, now."""
    environment = server_environment(resolve(arguments.model)) | _on_cores("0")
    options = ["--output", str(arguments.profile), "--restart", "--batch-sizes", "1,2,3,4,6,8,12,16,20"]
    options += ["--contexts", "128,384", "--steps", "16", "--", *_flags(arguments)]
    subprocess.run(
        [sys.executable, "-m", "vllm_rollout.cli", "profile", arguments.model, *options],
        env=environment, check=True, stdout=sys.stderr,
    )  # fmt: skip


def _server(name: Server, arguments: argparse.Namespace, folder: Path) -> ServerProcess:
    flags = ["--data-parallel-size", "2", "--api-server-count", "1", "--disable-uvicorn-access-log"]
    flags += ["--rollout-profile", str(arguments.profile), "--rollout-move-kv", MOVE_KV[name], *_flags(arguments)]
    return server_process("rollout", resolve(arguments.model), flags, folder / f"{name}.log", **_on_cores("0|1"))


def _on_cores(cores: str) -> dict[str, str]:
    return {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2"} if runs_on_cpu() else {}


async def _measure(bench: Bench) -> list[dict[str, Any]]:
    rows = []
    for server in bench.servers.values():
        await _warm_up(server, _request(bench.arguments, 0))
    for repeat in range(bench.arguments.repeats):
        said: dict[Way, Step] = {}
        for way in (*WAYS[repeat % 3 :], *WAYS[: repeat % 3]):
            name = way if way != "off" else get_args(Server)[repeat % 2]
            said[way] = await _step(bench, bench.servers[name], way, repeat)
            rows.append({"way": way, "repeat": repeat, "server": name, **_row(said[way], bench.cost)})
            told = {key: round(rows[-1][key], 3) for key in ("seconds", "freed_rank_s")}
            bench.console.print(f"{repeat} {way} {told} {len(rows[-1]['consolidations'])}", highlight=False)
        for row in rows[-len(WAYS) :]:
            own, stayed = said[row["way"]].token_ids, said["off"].token_ids
            row["num_other_answers"] = sum(own[candidate] != stayed[candidate] for candidate in stayed)
    return rows


async def _step(bench: Bench, server: ServerProcess, way: Way, repeat: int) -> Step:
    request = _request(bench.arguments, repeat) | {"migration": "off" if way == "off" else "consolidate"}
    async with AsyncRolloutClient(server.url) as client:
        return await watched(client, server.log, BLOCK_SIZE, **request)


def _request(arguments: argparse.Namespace, repeat: int) -> dict[str, Any]:
    questions = [*SHORT[: arguments.short], *LONG[: arguments.long]]
    seed = arguments.seed + 1000 * repeat
    random.Random(seed).shuffle(questions)
    prompts = [
        {"id": str((*SHORT, *LONG).index(question)), "messages": [{"role": "user", "content": question}]}
        for question in questions
    ]
    sampling = {"temperature": 1.0, "max_tokens": arguments.max_tokens, "seed": seed}
    return {"prompts": prompts, "group_size": arguments.group_size, "sampling": sampling, "return_logprobs": False}


async def _warm_up(server: ServerProcess, request: dict[str, Any]) -> None:
    """Moves in both directions."""
    async with AsyncRolloutClient(server.url) as client:
        sampling = request["sampling"] | {"max_tokens": WARM_UP_TOKENS, "ignore_eos": True}
        rollout = asyncio.create_task(client.rollout(**(request | {"sampling": sampling})))
        while not all(engine.num_running for engine in await client.engines()):
            await asyncio.sleep(LOOK_S)
        for rank in (0, 1):
            await client.drain(rank)
            await client.restore(rank)
        await rollout


def _row(step: Step, cost: CostModel) -> dict[str, Any]:
    return {
        "load_average_1min": round(os.getloadavg()[0], 2),
        "seconds": step.seconds,
        "busy_s": step.busy_s,
        "freed_rank_s": step.freed_rank_s,
        "num_moves": len(step.moved),
        "longest_move_s": max((group.seconds for group in step.moved), default=0.0),
        "moving_s": step.moving_s,
        "decoding_lost_share": decoding_lost_share(step),
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
    add("--short", type=int, default=8, help="prompts that ask for short answers (default %(default)s)")
    add("--long", type=int, default=2, help="prompts that ask for long ones (default %(default)s)")
    add("--group-size", type=int, default=4, help="candidates of a prompt (default %(default)s)")
    add("--max-tokens", type=int, default=384, help="default %(default)s")
    add("--repeats", type=int, default=5, help="of every way (default %(default)s)")
    add("--seed", type=int, default=0, help="repeat r has this + 1000 r (default %(default)s)")
    add("--profile", type=Path, default=PROFILE, help="where the profile goes (default %(default)s)")
    add("--output", type=Path, default=OUTPUT)
    return parser.parse_args(given)

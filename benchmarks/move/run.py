"""What a running group waits when it moves to another rank: `python -m benchmarks.move`.

Two data-parallel ranks, on a CPU of one core each. A group streams token by token; once all of its candidates have
generated a few tokens, its rank is drained. Measured by the client are the seconds from the drain request to the first
token that the other rank makes: the first one after the longest silence between two of a candidate's tokens since that
request. The median candidate counts, and the median repeat. Prompts are random tokens, so no prefix cache knows them;
siblings share theirs.

Two servers, one after the other: the KV blocks go along (`--rollout-move-kv auto`), or the other rank computes prompt
and output again (`off`). Each context is asked for once before it is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from rich.console import Console

from benchmarks.common import ROOT, median, record_of_run, server_process, write_json
from benchmarks.tables import grid, number
from vllm_rollout.client.client import AsyncRolloutClient
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.process import ServerProcess, exit_on_sigterm, log_folder, runs_on_cpu
from vllm_rollout.server.answers import TokensEvent

OUTPUT = ROOT / "benchmarks/results/move.json"
Way = Literal["recompute", "kv"]
FLAGS: dict[Way, str] = {"recompute": "off", "kv": "auto"}
FIRST_TOKEN_ID, LAST_TOKEN_ID = 1000, 40_000
"""Of prompts: none of them is special to the model."""
NUM_BEFORE, NUM_AFTER = 16, 8
"""Output tokens of each candidate when the drain is asked for, and after it is answered."""
MAX_TOKENS = 1024
"""More than a group could come to before it is moved."""


class Asked(NamedTuple):
    """One move."""

    wait_s: float
    """From the drain request to the first token of the other rank."""
    step_s: float
    """Between two tokens before the move."""
    drain_s: float
    """Until the drain is answered."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 1024, 1900], help="tokens at the move")
    parser.add_argument("--group-size", type=int, default=1, help="candidates, which share the prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    exit_on_sigterm()
    workload = {
        "model": arguments.model,
        "contexts": arguments.contexts,
        "group_size": arguments.group_size,
        "repeats": arguments.repeats,
        "conditions": __doc__,
    }
    begun = record_of_run(seed=arguments.seed, workload=workload)
    measured = {way: _measure(way, arguments) for way in get_args(Way)}
    result = {**begun, "moves": measured}
    write_json(arguments.output, result)
    print(table(result))


def _measure(way: Way, arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """The moves of one server, by context."""
    flags = ["--data-parallel-size", "2", "--api-server-count", "1", "--max-model-len", "4096"]
    flags += ["--rollout-move-kv", FLAGS[way], "--disable-uvicorn-access-log"]
    environment: dict[str, str] = {}
    if runs_on_cpu():
        flags.append("--enforce-eager")
        environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    console = Console(stderr=True)
    with log_folder() as folder:
        model = resolve(arguments.model)
        with server_process("rollout", model, flags, folder / f"{way}.log", **environment) as server:
            server.wait_until_healthy(lambda seconds, line: None)
            return asyncio.run(_moves(way, server, arguments, console))


async def _moves(
    way: Way, server: ServerProcess, arguments: argparse.Namespace, console: Console
) -> dict[str, list[dict[str, float]]]:
    chance = random.Random(arguments.seed)
    found: dict[str, list[dict[str, float]]] = {}
    async with AsyncRolloutClient(server.url) as client:
        for context in arguments.contexts:
            asked = []
            for _ in range(1 + arguments.repeats):
                prompt = [chance.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(context - NUM_BEFORE)]
                asked.append(await _move(client, prompt, arguments.group_size))
                console.print(f"{way}, {context} tokens: {asked[-1].wait_s:.3f} s")
            found[str(context)] = [each._asdict() for each in asked[1:]]
    return found


async def _move(client: AsyncRolloutClient, prompt: list[int], group_size: int) -> Asked:
    """Let a group run, drain its rank, and restore it."""
    arrivals: list[list[float]] = [[] for _ in range(group_size)]
    """Of each candidate's tokens."""
    rank: asyncio.Task[int] | None = None
    drain: asyncio.Task[float] | None = None
    drained_at, num_after = 0.0, 0
    stream = client.stream(
        [{"prompt_token_ids": prompt}],
        group_size=group_size,
        stream_tokens=1,
        sampling={"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 1.0},
    )
    async with aclosing(stream) as events:
        async for event in events:
            if not isinstance(event, TokensEvent):
                continue
            arrivals[event.index] += [time.perf_counter()] * len(event.token_ids)
            if rank is None:
                rank = asyncio.create_task(_busy_rank(client))
            elif drain is None and min(map(len, arrivals)) >= NUM_BEFORE:
                drained_at = time.perf_counter()
                drain = asyncio.create_task(_drain(client, await rank))
            elif drain is not None and drain.done():
                num_after += 1
                if num_after >= NUM_AFTER * group_size:
                    break
    assert drain is not None, "the group has streamed no tokens"
    return Asked(
        median(_end_of_silence(times, drained_at) - drained_at for times in arrivals),
        median(end - start for times in arrivals for start, end in pairwise(times[1:NUM_BEFORE])),
        await drain,
    )


def _end_of_silence(times: Sequence[float], since: float) -> float:
    """When the first token after the longest pause came."""
    pauses = [(end - max(start, since), end) for start, end in pairwise(times) if end > since]
    return max(pauses)[1]


async def _busy_rank(client: AsyncRolloutClient) -> int:
    (rank,) = [engine.rank for engine in await client.engines() if engine.num_groups]
    return rank


async def _drain(client: AsyncRolloutClient, rank: int) -> float:
    """Seconds that it takes to move what runs there to the other rank."""
    started = time.perf_counter()
    answer = await client.drain(rank)
    ended = time.perf_counter()
    assert (answer.state, answer.num_moved) == ("drained", 1), f"the group did not move: {answer}"
    await client.restore(rank)
    return ended - started


def table(result: dict[str, Any]) -> str:
    moves = result["moves"]
    rows = []
    for context in map(str, result["workload"]["contexts"]):
        waits = {way: median(each["wait_s"] for each in moves[way][context]) for way in get_args(Way)}
        step_s = median(each["step_s"] for way in get_args(Way) for each in moves[way][context])
        rows.append([context, *(number(waits[way]) for way in get_args(Way)), number(step_s)])
    header = ["tokens at the move", "computed again, s", "KV blocks taken along, s", "one step, s"]
    return grid("From the drain request to the first token of the other rank", header, rows)

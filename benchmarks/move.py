"""Delay of a running group that moves to another rank: `python -m benchmarks.move`.

There are two data-parallel ranks, on a CPU of one core each. A group streams token by token. When all of its candidates
have generated a few tokens, its rank is drained. The client measures the seconds from the drain request to the first
token of the other rank. This is the first token after the longest pause between two of a candidate's tokens since the
request. Results are medians over candidates, then over repeats. Prompts are random tokens, so no prefix cache has them.
Siblings share their prompt.

There are two servers, one after the other. In one the KV blocks move too (the default). In the other, the new rank
computes prompt and output again (`--no-enable-rollout-move-kv`). Each context runs once before it is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import Any

from benchmarks.common import arguments_of, median, publish, record_of_run, server_process, started
from benchmarks.tables import columns, number
from vllm_rollout import AsyncRolloutClient
from vllm_rollout.kernel.http.answers import TokensEvent
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.on_cpu import this_cpu
from vllm_rollout.process import ServerProcess, exit_on_sigterm, log_folder, runs_on_cpu

MOVE_KV = {"recompute": "--no-enable-rollout-move-kv", "kv": "--enable-rollout-move-kv"}
"""Flag of the server, by way."""
NUM_BEFORE, NUM_AFTER = 16, 8
"""Output tokens of each candidate before the drain request, and after the drain is answered."""
MAX_TOKENS = 1024
"""Length cap in tokens, which no group reaches before it is moved."""


def main() -> None:
    parser = arguments_of(__doc__, "move", repeats=3)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 1024, 1900], help="context in tokens")
    parser.add_argument("--group-size", type=int, default=1, help="candidates that share the prompt")
    arguments = parser.parse_args()
    exit_on_sigterm()
    workload = {name: getattr(arguments, name) for name in ("model", "contexts", "group_size", "repeats")}
    begun = record_of_run(seed=arguments.seed, workload={**workload, "conditions": __doc__})
    publish(arguments, {**begun, "moves": {way: _measure(way, arguments) for way in MOVE_KV}}, table)


def _measure(way: str, arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Moves on one server, by context."""
    flags = ["--data-parallel-size", "2", "--api-server-count", "1", "--max-model-len", "4096"]
    flags += [MOVE_KV[way], "--disable-uvicorn-access-log"]
    environment: dict[str, str] = {}
    if runs_on_cpu():
        flags += ["--enforce-eager", "--dtype", this_cpu().dtype]
        environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    with (
        log_folder() as folder,
        started(server_process("rollout", resolve(arguments.model), flags, folder / "log", **environment)) as server,
    ):
        return asyncio.run(_moves(server, arguments))


async def _moves(server: ServerProcess, arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    chance = random.Random(arguments.seed)
    found: dict[str, list[dict[str, float]]] = {}
    async with AsyncRolloutClient(server.url) as client:
        for context in arguments.contexts:
            moves = []
            for _ in range(1 + arguments.repeats):
                prompt = [chance.randint(1000, 40_000) for _ in range(context - NUM_BEFORE)]
                moves.append(await _move(client, prompt, arguments.group_size))
                print(f"{context} tokens: {moves[-1]['wait_s']:.3f} s", file=sys.stderr)
            found[str(context)] = moves[1:]
    return found


async def _move(client: AsyncRolloutClient, prompt: list[int], group_size: int) -> dict[str, float]:
    """Let a group run, drain its rank, and restore the rank.

    Returns: seconds from the drain request to the first token of the other rank, between two tokens before the move,
    and until the drain is answered.
    """
    arrivals: list[list[float]] = [[] for _ in range(group_size)]
    """Arrival times of each candidate's tokens."""
    rank: asyncio.Task[int] | None = None
    drain: asyncio.Task[float] | None = None
    drained_at, num_after = 0.0, 0
    sampling = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 1.0}
    stream = client.stream(
        [{"prompt_token_ids": prompt}], group_size=group_size, stream_tokens=1, sampling_params=sampling
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
    return {
        "wait_s": median(_end_of_silence(times, drained_at) - drained_at for times in arrivals),
        "step_s": median(end - start for times in arrivals for start, end in pairwise(times[1:NUM_BEFORE])),
        "drain_s": await drain,
    }


def _end_of_silence(times: Sequence[float], since: float) -> float:
    """Arrival time of the first token after the longest pause."""
    return max((end - max(start, since), end) for start, end in pairwise(times) if end > since)[1]


async def _busy_rank(client: AsyncRolloutClient) -> int:
    (rank,) = [engine.rank for engine in await client.engines() if engine.num_groups]
    return rank


async def _drain(client: AsyncRolloutClient, rank: int) -> float:
    """Seconds of a drain, which moves the running group to the other rank. Restores the rank afterwards."""
    started = time.perf_counter()
    answer = await client.drain(rank)
    ended = time.perf_counter()
    assert (answer.state, answer.num_moved) == ("drained", 1), f"the group did not move: {answer}"
    await client.restore(rank)
    return ended - started


def table(result: dict[str, Any]) -> str:
    moves = result["moves"]

    def wait_s(way: str, row: dict[str, int]) -> str:
        return number(median(each["wait_s"] for each in moves[way][str(row["context"])]))

    return columns(
        "From the drain request to the first token of the other rank",
        [{"context": context} for context in result["workload"]["contexts"]],
        {
            "tokens at the move": lambda row: str(row["context"]),
            "computed again, s": lambda row: wait_s("recompute", row),
            "KV blocks taken along, s": lambda row: wait_s("kv", row),
            "one step, s": lambda row: number(
                median(each["step_s"] for way in moves.values() for each in way[str(row["context"])])
            ),
        },
    )


if __name__ == "__main__":
    main()

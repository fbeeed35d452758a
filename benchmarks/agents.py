"""Groups of agents on an emulated device: who waits, who races, and what runs on after a group is over.

Everything but the device and the tools is the real thing. A conversation has 2 to 8 turns (40 tokens in the mean,
log-normal), between them tools (0.5 s in the mean, log-normal with sigma 1) that fail in 5 of 100 calls: then the
session is void. 8 conversations per group are wanted. Ways, in turns, with the same groups, turns and tools:

wait 8         plain requests, 8 conversations; wait for all
wait 12        plain requests, 12 conversations; wait for all, keep the first 8
client         plain requests, 12 conversations; when 8 have ended the client cancels the others, which closes their
               requests
race           `client.agents`, 8 of 12; void ones are not replaced, so that a group may lack some
refill         `client.agents`, 8 of 12; void ones are replaced when too few are left

"wait" and "client" replace void ones by the same rule as "refill". Tokens are those that the device computed (its step
log). *After*: of turns that began, or went on, after their group was over. Times are stretched by --speeds, and told in
the device's seconds.

stops          of 12 sessions per group 11 are amid long turns when the 12th finishes: tokens that each of the 11 gets
               from then on, by the step log
affinity       two ranks, all conversations run to their end: share of prompt tokens found in the prefix cache, with
               sessions and without

Run from the repository root: python -m benchmarks.agents
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import uvloop
from rich.console import Console

from benchmarks.common import arguments_of, median, publish, raise_file_limit, record_of_run, server_process
from benchmarks.tables import columns, number, percent
from vllm_rollout import AgentSession, AsyncRolloutClient, Void
from vllm_rollout.client.calls import Call, typed
from vllm_rollout.emulation.step_log import LoggedStep, read_steps
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.process import ServerProcess, counter, exit_on_sigterm

GROUP_SIZE, NUM_CANDIDATES = 8, 12
WAYS = ("wait 8", "wait 12", "client", "race", "refill")
PROMPT_TOKENS, TOOL_TOKENS = 200, 40
TOOL_S, TURN_TOKENS, FAILURE_RATE = 0.5, 40, 0.05
DEVICE = {"step": {"ms": 8.0, "ms_per_request": 0.02, "ms_per_prefilled_token": 0.01}, "kv_tokens": 4_000_000}
LONG_TOKENS = 2000
"""Of a turn that nobody lets end."""


class Turn(NamedTuple):
    num_tokens: int
    tool_s: float
    """After it."""
    tool_fails: bool


def turns_of(seed: int, group: int, number: int) -> list[Turn]:
    """What becomes of a conversation, the same in every way."""
    chance = random.Random(f"agents/{seed}/{group}/{number}")
    return [
        Turn(
            max(2, min(400, round(chance.lognormvariate(math.log(TURN_TOKENS) - 0.32, 0.8)))),
            chance.lognormvariate(math.log(TOOL_S) - 0.5, 1.0),
            chance.random() < FAILURE_RATE,
        )
        for _ in range(chance.randint(2, 8))
    ]


def prompt_of(seed: int, group: int) -> list[int]:
    chance = random.Random(f"agents/{seed}/{group}")
    return [chance.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)]


@dataclass
class Ran:
    """A turn that the client saw end."""

    group: int
    began: float
    ended: float
    num_tokens: int


@dataclass
class Step:
    """What a client saw of one step of training."""

    turns: list[Ran] = field(default_factory=list)
    over: dict[int, float] = field(default_factory=dict)
    """When each group was."""
    kept_tokens: int = 0
    num_kept: int = 0

    def after(self) -> tuple[int, float]:
        """Turns that began when their group was over, and tokens from then on of turns that ended."""
        late = [turn for turn in self.turns if turn.began > self.over[turn.group]]
        tokens = 0.0
        for turn in self.turns:
            share = (turn.ended - max(turn.began, self.over[turn.group])) / (turn.ended - turn.began)
            tokens += turn.num_tokens * max(0.0, share)
        return len(late), tokens


Complete = Callable[[list[int], int], Awaitable[list[int]]]
"""Tokens of a prompt, and how many shall answer it: those."""


async def converse(turns: list[Turn], tokens: list[int], complete: Complete, speed: float) -> int:
    """One conversation; how many tokens the policy said. Raises: Void where a tool fails."""
    total = 0
    for index, turn in enumerate(turns):
        if index:
            before = turns[index - 1]
            await asyncio.sleep(before.tool_s / speed)
            if before.tool_fails:
                raise Void("the tool failed")
            tokens = [*tokens, *range(500, 500 + TOOL_TOKENS)]
        answer = await complete(tokens, turn.num_tokens)
        tokens, total = [*tokens, *answer], total + len(answer)
    return total


def fields_of(num_tokens: int) -> dict[str, Any]:
    xargs = {"emulate_lengths": num_tokens}
    return {"max_tokens": LONG_TOKENS + 1, "return_token_ids": True, "logprobs": None, "vllm_xargs": xargs}


class Bench:
    """One step of one way."""

    def __init__(self, client: AsyncRolloutClient, seed: int, num_groups: int, speed: float) -> None:
        self.client, self.seed, self.num_groups, self.speed = client, seed, num_groups, speed
        self.step = Step()

    async def run(self, way: str, **options: Any) -> Step:
        if way in ("race", "refill"):
            await self._race(max_sessions=NUM_CANDIDATES if way == "race" else None, **options)
        else:
            num = GROUP_SIZE if way == "wait 8" else NUM_CANDIDATES
            await asyncio.gather(*(self._rival(group, num, way == "client") for group in range(self.num_groups)))
        return self.step

    def _timed(self, group: int, complete: Complete) -> Complete:
        async def timed(tokens: list[int], num_tokens: int) -> list[int]:
            began = time.perf_counter()
            answer = await complete(tokens, num_tokens)
            self.step.turns.append(Ran(group, began, time.perf_counter(), len(answer)))
            return answer

        return timed

    def _converse(self, group: int, number: int, complete: Complete) -> Awaitable[int]:
        tokens = prompt_of(self.seed, group)
        return converse(turns_of(self.seed, group, number), tokens, self._timed(group, complete), self.speed)

    async def _race(self, **options: Any) -> None:
        async def run(session: AgentSession) -> float:
            async def complete(tokens: list[int], num_tokens: int) -> list[int]:
                answer = await session.complete(tokens, **fields_of(num_tokens))
                return list(answer["choices"][0]["token_ids"])

            await self._converse(session.prompt, session.number, complete)
            self.step.over[session.prompt] = time.perf_counter()  # the last one's stays
            return 1.0

        groups = self.client.agents(
            range(self.num_groups), GROUP_SIZE, NUM_CANDIDATES - GROUP_SIZE, run=run, max_concurrent=4096, **options
        )
        async with aclosing(groups):
            async for group in groups:
                self.step.kept_tokens += group.returned_tokens
                self.step.num_kept += len(group.trajectories)

    async def _rival(self, group: int, num_candidates: int, cancels: bool) -> None:
        """What a harness does that knows plain vLLM."""

        async def complete(tokens: list[int], num_tokens: int) -> list[int]:
            body = {"prompt": tokens, **fields_of(num_tokens)}
            answer = await self.client.send(Call("POST", "/v1/completions", typed(dict[str, Any]), body))
            return list(answer["choices"][0]["token_ids"])

        numbers = iter(range(1000))
        running = {asyncio.create_task(self._converse(group, next(numbers), complete)) for _ in range(num_candidates)}
        kept: list[int] = []
        while running and not (cancels and len(kept) >= GROUP_SIZE):
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            kept += [task.result() for task in done if task.exception() is None]
            if len(kept) >= GROUP_SIZE:
                self.step.over.setdefault(group, time.perf_counter())
            while len(kept) + len(running) < GROUP_SIZE:
                running.add(asyncio.create_task(self._converse(group, next(numbers), complete)))
        for task in running:
            task.cancel()
        self.step.kept_tokens += sum(kept[:GROUP_SIZE])
        self.step.num_kept += GROUP_SIZE


class Log:
    """The device's steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def steps(self) -> list[LoggedStep]:
        return [step for log in read_steps(self._folder) for step in log.steps]

    async def since(self, began: float) -> list[LoggedStep]:
        """All from then on, when nothing runs any more."""
        while True:
            before = self.steps()
            await asyncio.sleep(1.0)
            if len(after := self.steps()) == len(before):
                return [step for step in after if step.start >= began]


async def measure(url: str, log: Log, way: str, seed: int, num_groups: int, speed: float) -> dict[str, Any]:
    async with AsyncRolloutClient(url) as client:
        bench = Bench(client, seed, num_groups, speed)
        began = time.perf_counter()
        cpu = time.process_time()
        step = await bench.run(way)
        ended, cpu = time.perf_counter(), time.process_time() - cpu
        steps = await log.since(began)
    generated = sum(each.num_sampled for each in steps)
    for group in range(num_groups):  # one that lacks some is over at the end
        step.over.setdefault(group, ended)
    late_turns, late_tokens = step.after()
    return {
        "way": way, "seed": seed, "seconds": (ended - began) * speed, "generated_tokens": generated,
        "wasted_tokens": generated - step.kept_tokens, "kept_share": step.num_kept / (GROUP_SIZE * num_groups),
        "turns_after": late_turns, "tokens_after": round(late_tokens), "client_cpu_s": cpu,
        "cut_tokens": generated - sum(turn.num_tokens for turn in step.turns),
    }  # fmt: skip


async def measure_stops(url: str, log: Log, way: str, num_groups: int, speed: float) -> dict[str, Any]:
    """How long losers go on amid a turn."""
    ends: list[float] = []
    go = asyncio.Event()
    num_losers = (NUM_CANDIDATES - 1) * num_groups
    chance = random.Random(num_groups)
    pauses = [chance.uniform(0, 2) / speed for _ in range(num_groups)]

    async def run(session: AgentSession) -> float:
        if session.number:
            await session.complete([1000 + session.prompt] * 20, **fields_of(LONG_TOKENS))
        else:
            await session.complete([1000 + session.prompt] * 20, **fields_of(2))
            await go.wait()
            await asyncio.sleep(pauses[session.prompt])
            ends.append(time.perf_counter())
        return 1.0

    async with AsyncRolloutClient(url) as client:

        async def plain(group: int) -> None:
            body = {"prompt": [1000 + group] * 20, **fields_of(LONG_TOKENS)}
            call = Call("POST", "/v1/completions", typed(dict[str, Any]), body)
            losers = [asyncio.create_task(client.send(call)) for _ in range(NUM_CANDIDATES - 1)]
            await go.wait()
            await asyncio.sleep(pauses[group])
            ends.append(time.perf_counter())
            for task in losers:
                task.cancel()

        async def race() -> None:
            groups = client.agents(range(num_groups), 1, NUM_CANDIDATES - 1, run=run, max_concurrent=4096)
            async for _ in groups:
                pass

        whole = asyncio.gather(*map(plain, range(num_groups))) if way == "client" else asyncio.create_task(race())
        while not (steps := log.steps()) or steps[-1].num_requests < num_losers:
            await asyncio.sleep(0.1)
        began = time.perf_counter()
        go.set()
        await whole
        steps = await log.since(began)
    wanted = sum((NUM_CANDIDATES - 1) * sum(step.start < end for step in steps) for end in ends)
    return {"way": way, "tokens": (sum(step.num_sampled for step in steps) - wanted) / num_losers}


@contextmanager
def server(folder: Path, speed: float, num_ranks: int = 1) -> Iterator[tuple[ServerProcess, Log]]:
    folder.mkdir()
    device = folder / "device.json"
    device.write_text(json.dumps(DEVICE))
    flags = [
        "--emulate", str(device), "--emulate-log", str(folder / "steps"), "--emulate-speed", str(speed),
        "--max-num-seqs", "2048", "--max-model-len", "8192", "--max-num-batched-tokens", "8192",
        "--data-parallel-size", str(num_ranks), "--api-server-count", "1", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    with server_process("rollout", resolve(DEFAULT_MODEL), flags, folder / "server.log") as process:
        process.wait_until_healthy(lambda seconds, line: None)
        yield process, Log(folder / "steps")


async def measure_affinity(url: str, log: Log, way: str, seed: int, num_groups: int) -> dict[str, Any]:
    def counted() -> tuple[float, float]:
        text = httpx.get(f"{url}/metrics", timeout=30).text
        return counter(text, "vllm:prefix_cache_hits_total"), counter(text, "vllm:prefix_cache_queries_total")

    hits, queries = counted()
    async with AsyncRolloutClient(url) as client:
        bench = Bench(client, seed, num_groups, 1.0)
        began = time.perf_counter()
        step = await bench.run(way, **({"early_stop": False} if way == "race" else {}))
        ended = time.perf_counter()
        await log.since(began)
    found, asked = counted()
    return {
        "way": "sessions" if way == "race" else "plain requests", "seconds": ended - began,
        "hit_share": (found - hits) / (asked - queries),
        "computed_tokens_per_turn": (asked - queries - found + hits) / len(step.turns),
    }  # fmt: skip


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    say = Console(stderr=True).print
    runs: list[dict[str, Any]] = []
    stops: list[dict[str, Any]] = []
    affinity: list[dict[str, Any]] = []
    for num_groups, speed in zip(arguments.groups, arguments.speeds, strict=True):
        with server(folder / f"{num_groups}", speed) as (process, log):
            size = {"groups": num_groups, "sessions": num_groups * NUM_CANDIDATES, "speed": speed}
            for repeat in range(arguments.repeats):
                ways = WAYS[repeat % len(WAYS) :] + WAYS[: repeat % len(WAYS)]
                for way in ways:
                    seed = arguments.seed + repeat
                    row = size | uvloop.run(measure(process.url, log, way, seed, num_groups, speed))
                    runs.append(row)
                    say(f"{row['sessions']} sessions, {way}: {row['seconds']:.1f} s", highlight=False)
            for way in ("client", "race"):
                stops.append(size | uvloop.run(measure_stops(process.url, log, way, num_groups, speed)))
                say(f"{size['sessions']} sessions, stops, {way}: {stops[-1]['tokens']:.2f}", highlight=False)
    with server(folder / "ranks", 1.0, num_ranks=2) as (process, log):
        for repeat in range(arguments.repeats):
            for number, way in enumerate(("race", "wait 12") if repeat % 2 else ("wait 12", "race")):
                seed = 1000 + 10 * repeat + number  # prompts that no way before had
                affinity.append(uvloop.run(measure_affinity(process.url, log, way, seed, arguments.groups[0] * 2)))
                say(f"affinity, {affinity[-1]}", highlight=False)
    return {"runs": runs, "stops": stops, "affinity": affinity}


def main() -> None:
    parser = arguments_of(__doc__, "agents", repeats=3)
    add = parser.add_argument
    add("--groups", type=int, nargs="+", default=[5, 21, 85], help="at once, of 12 sessions (default %(default)s)")
    add(
        "--speeds", type=float, nargs="+", default=[1.0, 1.0, 0.5], help="--emulate-speed of each (default %(default)s)"
    )
    arguments = parser.parse_args()
    exit_on_sigterm()
    raise_file_limit(8192)
    workload = {
        "conditions": __doc__, "group_size": GROUP_SIZE, "candidates": NUM_CANDIDATES, "device": DEVICE,
        "turns": [2, 8], "turn_tokens": TURN_TOKENS, "tool_s": TOOL_S, "tool_failures": FAILURE_RATE,
        "prompt_tokens": PROMPT_TOKENS, "tool_tokens": TOOL_TOKENS,
    }  # fmt: skip
    result = record_of_run(seed=arguments.seed, workload=workload)
    with tempfile.TemporaryDirectory() as name:
        result |= run(arguments, Path(name))
    publish(arguments, result | {"medians": medians(result["runs"])}, tables)


def medians(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each number, by size and way."""
    keys = list(dict.fromkeys((row["sessions"], row["way"]) for row in runs))
    found = []
    for sessions, way in keys:
        rows = [row for row in runs if (row["sessions"], row["way"]) == (sessions, way)]
        numbers = {name: median(row[name] for row in rows) for name in rows[0] if name not in ("way", "seed")}
        found.append({"way": way, **numbers})
    return found


def tables(result: dict[str, Any]) -> str:
    rows = result["medians"]
    refill = {row["sessions"]: row["seconds"] for row in rows if row["way"] == "refill"}
    steps = columns("A step", rows, {
        "sessions": lambda row: number(int(row["sessions"])),
        "way": lambda row: row["way"],
        "s": lambda row: number(row["seconds"], 1),
        "× refill": lambda row: number(row["seconds"] / refill[row["sessions"]], 2) if refill else number(None),
        "tokens": lambda row: number(int(row["generated_tokens"])),
        "wasted": lambda row: number(int(row["wasted_tokens"])),
        "turns after": lambda row: number(int(row["turns_after"])),
        "tokens after": lambda row: number(int(row["tokens_after"])),
        "trajectories": lambda row: percent(row["kept_share"], 1),
    })  # fmt: skip
    stops = columns("Tokens of a turn after its group was over", result["stops"], {
        "sessions": lambda row: number(row["sessions"]),
        "way": lambda row: row["way"],
        "tokens": lambda row: number(row["tokens"], 2),
    })  # fmt: skip
    affinity = columns("Two ranks", result["affinity"], {
        "": lambda row: row["way"],
        "found in the prefix cache": lambda row: percent(row["hit_share"], 1),
        "computed prompt tokens per turn": lambda row: number(row["computed_tokens_per_turn"], 1),
    })  # fmt: skip
    return "\n\n".join((steps, stops, affinity))


if __name__ == "__main__":
    main()

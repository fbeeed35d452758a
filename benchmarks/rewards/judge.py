"""What a judge beside the engine costs its decoding: with a core of its own, with a core that both use, against none.

Three servers of the same model, at work in turns: without a judge, with `--rollout-judge-cores 1`, and with 0. Each
decodes one rollout of 16 candidates to max_tokens, first while nobody asks the judge, then while gradings are always
under way (chats of their own, one token each). Ratios are taken within a repeat, the order rotating; a server that
waits takes no core.

On 2 cores: alone, vLLM has the first core for the model and the second for the rest of the engine. Reserved, the second
is the judge's, and the engine has the first for all it does. Shared, the judge is beside that rest on the second.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console

from benchmarks.common import ROOT, arguments_of, median, percentile, publish, ratios, record_of_run, server_process
from benchmarks.prompts import cycle
from benchmarks.tables import columns, number, percent
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.process import ServerProcess, exit_on_sigterm, log_folder, server_flags
from vllm_rollout.rewards import Trajectory
from vllm_rollout.rewards.judge import Judge, JudgeEngine

NUM_PROMPTS, GROUP_SIZE = 2, 8
NUM_GRADINGS = 4
"""At once."""
TIMEOUT_S = 300.0
JUDGED_WORDS = 30
TEMPLATE = "Question: {prompt}\n\nAnswer: {text}\n\nIs the answer right? Say yes or no."
CORES = {"none": None, "reserved": "1", "shared": "0"}
"""`--rollout-judge-cores` of each server."""


@dataclass(frozen=True, slots=True)
class Served:
    """A server, and its judge's place where it has one."""

    url: str
    judge: JudgeEngine | None


def main() -> None:
    parser = arguments_of(__doc__, "rewards.judge", repeats=5)
    parser.set_defaults(output=ROOT / "benchmarks/results/judge.json")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="of both engines (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each candidate (default %(default)s)")
    arguments = parser.parse_args()
    exit_on_sigterm()
    workload = {
        "candidates": NUM_PROMPTS * GROUP_SIZE, "max_tokens": arguments.max_tokens, "gradings_at_once": NUM_GRADINGS,
        "judged_words": JUDGED_WORDS, "cores": CORES, "model": arguments.model,
    }  # fmt: skip
    begun = record_of_run(seed=arguments.seed, workload=workload)
    publish(arguments, {**begun, "ways": measure(arguments)}, tables)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    model = resolve(arguments.model)
    with log_folder() as folder, ExitStack() as stack:
        servers = {name: stack.enter_context(_server(name, model, folder)) for name in CORES}
        served = {name: _ready(server) for name, server in servers.items()}
        return asyncio.run(_in_turns(served, arguments))


def _server(name: str, model: str, folder: Path) -> ServerProcess:
    flags = server_flags(NUM_PROMPTS * GROUP_SIZE)
    if CORES[name] is not None:
        flags += ["--rollout-judge", model, "--rollout-judge-cores", CORES[name]]
        flags.append(f"--rollout-judge-args={' '.join(server_flags(NUM_GRADINGS))}")
    for variable in ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):  # vLLM's own choice
        os.environ.pop(variable, None)
    return server_process("rollout", model, flags, folder / name, VLLM_CPU_KVCACHE_SPACE="1")


def _ready(server: ServerProcess) -> Served:
    server.wait_until_healthy(lambda seconds, line: None)
    found = re.search(r"judge .* starts; its log: (\S+)", server.log.read_text())
    if found is None:
        return Served(server.url, None)
    return Served(
        server.url, msgspec.json.decode(Path(found[1]).with_name("judge.json").read_bytes(), type=JudgeEngine)
    )


async def _in_turns(served: dict[str, Served], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    ways = ["none", *(f"{name}, {load}" for name in CORES if name != "none" for load in ("idle", "asked"))]
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    gradings: dict[str, list[float]] = {way: [] for way in ways}
    texts = count()
    order = list(ways)
    for repeat in range(arguments.repeats + 1):
        order.append(order.pop(0))
        for way in order:
            speed, graded = await _one(served[way.partition(",")[0]], way.endswith("asked"), texts, arguments)
            if repeat:  # the first round warms up
                speeds[way].append(speed)
                gradings[way].append(graded)
        Console(stderr=True).print(f"repeat {repeat} of {arguments.repeats}", highlight=False)
    return [_row(way, speeds, gradings) for way in ways]


async def _one(served: Served, asked: bool, texts: count[int], arguments: argparse.Namespace) -> tuple[float, float]:
    """Tokens decoded and trajectories graded in a second, while the rollout runs."""
    graded = 0

    async def grade(judge: Judge) -> None:
        nonlocal graded
        while True:
            text = " ".join(f"{next(texts)} and" for _ in range(JUDGED_WORDS // 2))
            grade = await judge.grade(Trajectory("Count.", text), TIMEOUT_S)
            if grade.status != "ok":
                raise RuntimeError(grade.reason)
            graded += 1

    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False))
        gradings = []
        if asked:
            assert served.judge is not None
            os.environ["JUDGE_KEY"] = served.judge.api_key
            # Every answer is a verdict, whatever the model thinks of it.
            judge = Judge(
                template=TEMPLATE, url=served.judge.url, model="judge", api_key_env="JUDGE_KEY", cache=0,
                pattern="()", values={"": 1.0}, sampling={"max_tokens": 1},
            )  # fmt: skip
            await stack.enter_async_context(judge)
            gradings = [asyncio.create_task(grade(judge)) for _ in range(NUM_GRADINGS)]
        prompts = [{"prompt": prompt} for prompt in cycle(NUM_PROMPTS)]
        sampling = {"max_tokens": arguments.max_tokens, "ignore_eos": True, "seed": arguments.seed}
        body = {"prompts": prompts, "group_size": GROUP_SIZE, "redundancy": 0, "sampling": sampling}
        while asked and not graded and not any(task.done() for task in gradings):
            await asyncio.sleep(0.01)
        began, before = time.perf_counter(), graded
        rollout = asyncio.create_task(client.post(f"{served.url}/v1/rollouts", json=body))
        await asyncio.wait([rollout, *gradings], return_when=asyncio.FIRST_COMPLETED)
        seconds, num_graded = time.perf_counter() - began, graded - before
        for task in gradings:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*gradings, return_exceptions=True)
        answer = (await rollout).raise_for_status().json()
    num_tokens = sum(len(each["token_ids"]) for group in answer["groups"] for each in group["trajectories"])
    assert num_tokens == NUM_PROMPTS * GROUP_SIZE * arguments.max_tokens, num_tokens
    return num_tokens / seconds, num_graded / seconds


def _row(way: str, speeds: dict[str, list[float]], gradings: dict[str, list[float]]) -> dict[str, Any]:
    found = ratios(speeds[way], speeds["none"])
    return {
        "way": way,
        "tokens_per_s": [round(speed, 1) for speed in speeds[way]],
        "graded_per_s": round(median(gradings[way]), 2),
        "of_none": {"median": median(found), "p25": percentile(found, 25), "p75": percentile(found, 75)},
    }


def tables(result: dict[str, Any]) -> str:
    return columns(
        "Decoding beside a judge",
        result["ways"],
        {
            "judge": lambda row: row["way"],
            "tokens per second": lambda row: number(median(row["tokens_per_s"]), 0),
            "of those without a judge": lambda row: percent(row["of_none"]["median"]),
            "quartiles": lambda row: f"{percent(row['of_none']['p25'])} to {percent(row['of_none']['p75'])}",
            "graded per second": lambda row: number(row["graded_per_s"], 1),
        },
    )


if __name__ == "__main__":
    main()

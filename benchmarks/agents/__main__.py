"""Groups of agents on an emulated device: waiting for all, racing, and turns that run on after a group is complete.

Everything but the device and the tools is real. A conversation has 4 turns on average (geometric) and 160 tokens on
average (log-normal). Between turns it calls a calculator or a search over six facts. A call takes 0.5 s on average
(log-normal with sigma 1), and 5 of 100 calls fail, which makes the conversation void. Each group wants 8 conversations.
The ways take turns, with the same conversations:

wait 8         plain requests, 8 conversations; wait for all
wait 16        plain requests, 16 conversations; wait for all, keep the first 8
client         plain requests, 16 conversations; when 8 have ended the client cancels the others, which closes their
               requests
race           `client.agents`, 8 of 16
pruned         as race, and the head stops half of the conversations that reach the 8th token of turn 2. One step of
               audit groups trains the head before
race 10        `client.agents`, 8 of 10; void conversations are not replaced, so a group may be incomplete
refill 10      as race 10, but void conversations are replaced

All ways but "race 10" replace void conversations when too few are left. Tokens are those that the server counts. *Turns
after* began after their group was complete, *tokens after* were generated after it. --speeds stretches times, and
results are in the device's seconds. *Simulated*: the replay of `vllm-rollout simulate` for the same conversations.
Device busy: the share of the time with work in which the device did not wait for the host.

affinity       two ranks, all conversations run to their end: the share of prompt tokens found in the prefix cache, turn
               by turn, with sessions and without. A turn has *moved* if it did not find the blocks of the turn before

Run from the repository root: python -m benchmarks.agents
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import httpx
import uvloop
from rich.console import Console

from benchmarks.agents.simulated import WAYS as SIMULATED
from benchmarks.agents.simulated import simulate
from benchmarks.agents.ways import (
    GROUP_SIZE,
    NUM_CANDIDATES,
    PRUNING,
    Bench,
    Way,
)
from benchmarks.agents.world import MEAN_TOKENS, PROMPT_TOKENS, TERMS, TOKENS_SIGMA, Tools
from benchmarks.common import (
    arguments_of,
    emulated_process,
    in_turn,
    median,
    publish,
    raise_file_limit,
    record_of_run,
    settled_tokens,
    started,
)
from benchmarks.tables import columns, number, percent
from vllm_rollout import AsyncRolloutClient
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.parts.emulation.step_log import LoggedStep, Summary, read_steps
from vllm_rollout.process import ServerProcess, exit_on_sigterm

WAYS: tuple[Way, ...] = get_args(Way)
DEVICE: dict[str, Any] = {
    "step": {"ms": 8.0, "ms_per_request": 0.02, "ms_per_prefilled_token": 0.01},
    "kv_tokens": 4_000_000,
    "score": {"auc": 0.8},
}
LATE_TURN = 5
"""This turn and all later ones share a row."""
TAUGHT_GROUPS = 16
AFFINITY: tuple[Way, ...] = ("race", "wait 16")


class Log:
    """The steps in the device's log."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def steps(self) -> list[LoggedStep]:
        return [step for log in read_steps(self._folder) for step in log.steps]

    async def since(self, began: float) -> list[LoggedStep]:
        """All steps from `began` on, once no step is added any more."""
        while True:
            before = self.steps()
            await asyncio.sleep(1.0)
            if len(after := self.steps()) == len(before):
                return [step for step in after if step.start >= began]


async def measure(
    url: str, log: Log, way: Way, seed: int, num_groups: int, speed: float, tools: Tools
) -> dict[str, Any]:
    async with AsyncRolloutClient(url) as client, httpx.AsyncClient(base_url=url, timeout=60) as http:
        before = await settled_tokens(http)
        bench = Bench(client, tools, seed, num_groups, speed)
        began = time.perf_counter()
        cpu = time.process_time()
        step = await bench.run(way)
        ended, cpu = time.perf_counter(), time.process_time() - cpu
        generated = round(await settled_tokens(http) - before)
        steps = await log.since(began)
    late_turns, late_tokens = step.after()
    row = {
        "way": way, "seed": seed, "seconds": (ended - began) * speed, "generated_tokens": generated,
        "wasted_tokens": generated - step.kept_tokens, "kept_share": step.num_kept / (GROUP_SIZE * num_groups),
        "turns_after": late_turns, "tokens_after": round(late_tokens), "client_cpu_s": round(cpu, 3),
        "device_rows": sum(each.num_sampled for each in steps), "device_busy": round(Summary.of(steps).busy, 4),
    }  # fmt: skip
    if way in SIMULATED:
        simulated = simulate(DEVICE, way, seed, num_groups)
        row |= {"simulated_seconds": simulated.seconds, "simulated_tokens": simulated.generated_tokens}
    return row


async def teach(url: str, seed: int, speed: float, tools: Tools) -> None:
    """Train the head on scores in turn 2, by audit groups."""
    async with AsyncRolloutClient(url) as client:
        await Bench(client, tools, seed, TAUGHT_GROUPS, speed).run("pruned", audit_ratio=1.0)


@contextmanager
def server(folder: Path, speed: float, num_ranks: int = 1) -> Iterator[tuple[ServerProcess, Log]]:
    folder.mkdir()
    flags = [
        "--rollout-emulate-log", str(folder / "steps"), "--rollout-emulate-speed", str(speed),
        "--max-num-seqs", "2048", "--max-model-len", "8192", "--max-num-batched-tokens", "8192",
        "--data-parallel-size", str(num_ranks), "--api-server-count", "1", "--enable-prompt-tokens-details",
    ]  # fmt: skip
    with started(emulated_process(DEVICE, flags, folder)) as process:
        yield process, Log(folder / "steps")


async def measure_affinity(
    url: str, log: Log, way: Way, seed: int, num_groups: int, speed: float, tools: Tools
) -> dict[str, Any]:
    found = re.search(r'block_size="(\d+)"', httpx.get(f"{url}/metrics", timeout=30).text)
    assert found is not None
    block = int(found[1])
    async with AsyncRolloutClient(url) as client:
        bench = Bench(client, tools, seed, num_groups, speed)
        began = time.perf_counter()
        step = await bench.run(way, **({"early_stop": False} if way == "race" else {}))
        ended = time.perf_counter()
        await log.since(began)
    turns = []
    for place in range(1, LATE_TURN + 1):
        of_number = [turn for turn in step.turns if min(turn.turn, LATE_TURN) == place]
        asked = sum(turn.num_prompt_tokens for turn in of_number)
        hits = sum(turn.answer.num_found for turn in of_number)
        moved = sum(turn.answer.num_found < max(0, turn.num_before - 1) // block * block for turn in of_number)
        turns.append({
            "turn": place, "turns": len(of_number), "hit_share": round(hits / asked, 4), "moved": moved,
            "computed_tokens_per_turn": round((asked - hits) / len(of_number), 1),
        })  # fmt: skip
    way_name = "sessions" if way == "race" else "plain requests"
    return {"way": way_name, "seed": seed, "seconds": (ended - began) * speed, "turns": turns}


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    say = Console(stderr=True).print
    runs: list[dict[str, Any]] = []
    affinity: list[dict[str, Any]] = []
    tools = Tools(resolve(DEFAULT_MODEL))
    sizes = zip(arguments.groups, arguments.speeds, arguments.repeats, strict=True)
    for num_groups, speed, repeats in sizes:
        with server(folder / f"{num_groups}", speed) as (process, log):
            size = {"groups": num_groups, "sessions": num_groups * NUM_CANDIDATES, "speed": speed}
            ways = tuple(way for way in WAYS if way in arguments.ways)
            if "pruned" in ways:
                uvloop.run(teach(process.url, arguments.seed - 1, speed, tools))
            for repeat in range(repeats):
                for way in in_turn(ways, 2 * repeat):
                    seed = arguments.seed + repeat
                    row = size | uvloop.run(measure(process.url, log, way, seed, num_groups, speed, tools))
                    runs.append(row)
                    say(row, highlight=False)
    if ways != WAYS:
        return {"runs": runs, "affinity": []}
    with server(folder / "ranks", arguments.speeds[0], num_ranks=2) as (process, log):
        for repeat in range(arguments.repeats[0]):
            for number, way in enumerate(AFFINITY if repeat % 2 else AFFINITY[::-1]):
                seed = 1000 + 10 * repeat + number  # prompts that no way before had
                measured = measure_affinity(
                    process.url, log, way, seed, arguments.groups[0] * 2, arguments.speeds[0], tools
                )
                affinity.append(uvloop.run(measured))
                say(affinity[-1], highlight=False)
    return {"runs": runs, "affinity": affinity}


def main() -> None:
    parser = arguments_of(__doc__, "agents")
    add = parser.add_argument
    add("--groups", type=int, nargs="+", default=[4, 16, 64], help="groups of 16 sessions (default %(default)s)")
    add("--speeds", type=float, nargs="+", default=[0.5, 0.25, 0.125], help="--rollout-emulate-speed of each size")
    add("--repeats", type=int, nargs="+", default=[5, 3, 1], help="seeds of each size (default %(default)s)")
    add("--ways", choices=WAYS, nargs="+", default=WAYS, help="ways to run. Only all of them include two ranks")
    arguments = parser.parse_args()
    exit_on_sigterm()
    raise_file_limit(8192)
    workload = {
        "conditions": __doc__, "group_size": GROUP_SIZE, "candidates": NUM_CANDIDATES, "device": DEVICE,
        "terms": asdict(TERMS), "mean_tokens": MEAN_TOKENS, "tokens_sigma": TOKENS_SIGMA,
        "prompt_tokens": PROMPT_TOKENS, "pruning": PRUNING,
    }  # fmt: skip
    result = record_of_run(seed=arguments.seed, workload=workload)
    with tempfile.TemporaryDirectory() as name:
        result |= run(arguments, Path(name))
    publish(arguments, result | {"medians": medians(result["runs"])}, tables)


def medians(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The median of each number, by size and way. Ratios are between runs of the same seed."""
    race = {(row["sessions"], row["seed"]): row for row in runs if row["way"] == "race"}
    found = []
    for sessions, way in dict.fromkeys((row["sessions"], row["way"]) for row in runs):
        rows = [row for row in runs if (row["sessions"], row["way"]) == (sessions, way)]
        numbers = {name: median(row[name] for row in rows) for name in rows[0] if name not in ("way", "seed")}
        for name in ("seconds", "generated_tokens"):
            numbers[f"{name}_to_race"] = median(row[name] / race[sessions, row["seed"]][name] for row in rows)
        if way in SIMULATED:
            for name, measured in (("simulated_seconds", "seconds"), ("simulated_tokens", "generated_tokens")):
                numbers[f"{name}_error"] = median(row[name] / row[measured] - 1 for row in rows)
        found.append({"way": way, **numbers})
    return found


def tables(result: dict[str, Any]) -> str:
    rows = result["medians"]
    steps = columns("A step", rows, {
        "sessions": lambda row: number(int(row["sessions"])),
        "way": lambda row: row["way"],
        "s": lambda row: number(row["seconds"], 1),
        "× race": lambda row: number(row["seconds_to_race"], 2),
        "tokens": lambda row: number(int(row["generated_tokens"])),
        "× race ": lambda row: number(row["generated_tokens_to_race"], 2),
        "wasted": lambda row: number(int(row["wasted_tokens"])),
        "turns after": lambda row: number(int(row["turns_after"])),
        "tokens after": lambda row: number(int(row["tokens_after"])),
        "trajectories": lambda row: percent(row["kept_share"], 1),
        "client CPU s": lambda row: number(row["client_cpu_s"], 1),
        "device busy": lambda row: percent(row["device_busy"]),
    })  # fmt: skip
    simulated = columns("Simulated", [row for row in rows if row["way"] in SIMULATED], {
        "sessions": lambda row: number(int(row["sessions"])),
        "way": lambda row: row["way"],
        "s": lambda row: number(row["simulated_seconds"], 1),
        "error": lambda row: percent(row["simulated_seconds_error"], 1),
        "tokens": lambda row: number(int(row["simulated_tokens"])),
        "error ": lambda row: percent(row["simulated_tokens_error"], 1),
    })  # fmt: skip
    affinity = columns("Two ranks", by_turn(result["affinity"]), {
        "turn": lambda row: f"{row['turn']}{' and later' if row['turn'] == LATE_TURN else ''}",
        "": lambda row: row["way"],
        "found in the prefix cache": lambda row: percent(row["hit_share"], 1),
        "computed prompt tokens per turn": lambda row: number(row["computed_tokens_per_turn"], 1),
        "turns": lambda row: number(row["turns"]),
        "moved": lambda row: number(row["moved"]),
    })  # fmt: skip
    return "\n\n".join((steps, simulated, affinity))


def by_turn(affinity: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians of shares and sums of counts, over all seeds."""
    rows = []
    for place in range(LATE_TURN):
        for way in dict.fromkeys(each["way"] for each in affinity):
            same = [each["turns"][place] for each in affinity if each["way"] == way]
            shares = {name: median(row[name] for row in same) for name in ("hit_share", "computed_tokens_per_turn")}
            counts = {name: sum(row[name] for row in same) for name in ("turns", "moved")}
            rows.append({"turn": place + 1, "way": way, **shares, **counts})
    return rows


if __name__ == "__main__":
    main()

"""Rounds at the scale of RollPacker's evaluation on an emulated device: `python -m benchmarks.rounds_emulated`.

Everything but the device is the real thing: HTTP, runs, vLLM's scheduler and data-parallel engine cores, cuts in the
step loop and across ranks. A setting is a pair of speculation factors, of prompts and of responses: 1,1 is plain
synchronous rounds. Each runs one period (as many short rounds as fill a long one, and that one), or two rounds where
nothing is deferred. Beside it stands the simulator, on the same lengths, step costs and order of prompts.

Time is stretched (--speed 0.5: every step lasts twice as long) as far as the host needs; seconds are the device's, that
is measured seconds times the speed. `idle` is the share in which a device waited for the host although it had work.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from rich.console import Console

from benchmarks.common import ROOT, percentile, record_of_run, write_json
from benchmarks.rounds_emulated.workload import FIRST_SEED, EmulatedDataSet, Workload, emulated_server
from benchmarks.rounds_simulated.setup import GPU_SOURCE, MESSAGE_S, MODEL_NAMES, MODEL_SOURCE, TAIL_SOURCE
from benchmarks.tables import grid, number, percent
from vllm_rollout.client.client import AsyncRolloutClient
from vllm_rollout.emulation.step_log import Summary, read_steps
from vllm_rollout.group.rounds import RoundKind, RunTerms
from vllm_rollout.process import ServerProcess, exit_on_sigterm
from vllm_rollout.simulator.rounds.replay import RunConditions, replay_run
from vllm_rollout.simulator.rounds.settings import RoundSetting

OUTPUT = ROOT / "benchmarks/results/rounds_emulated.json"
SETTINGS = ("1,1", "1,1.25", "1.25,1", "1.25,1.25", "1.5,1.5")


class RoundRow(NamedTuple):
    """A round, emulated or simulated; seconds of the device's clock."""

    kind: RoundKind
    seconds: float
    longest: int
    p75: float
    generated_tokens: int
    num_returned: int


def main() -> None:
    arguments = _parse_arguments()
    exit_on_sigterm()
    console = Console(stderr=True)
    its = Workload(arguments.model, arguments.ranks, arguments.prompts_per_round, arguments.group_size, arguments.seed)
    settings = [tuple(map(float, pair.split(","))) for pair in arguments.settings]
    result = record_of_run(
        seed=arguments.seed,
        workload={
            "conditions": __doc__, "model": its.model.described(), "ranks": its.num_ranks, "speed": arguments.speed,
            "prompts_per_round": its.prompts_per_round, "group_size": its.group_size, "device": its.device,
            "sources": [GPU_SOURCE, MODEL_SOURCE, TAIL_SOURCE],
        },
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, emulated_server(its, arguments.speed, Path(folder)) as server:
        server.wait_until_healthy(lambda seconds, line: None)
        rows = []
        for prompts, responses in settings:
            terms = its.terms(prompts, responses)
            rows.append(measure(its, terms, server, arguments.speed, Path(folder) / "steps"))
            console.print(f"{prompts:g}, {responses:g}: {rows[-1]['emulated']['seconds']:.1f} s", highlight=False)
    write_json(arguments.output, {**result, "settings": rows})
    print(table({**result, "settings": rows}))


def measure(its: Workload, terms: RunTerms, server: ServerProcess, speed: float, steps: Path) -> dict[str, Any]:
    """One setting, emulated and simulated."""
    data = EmulatedDataSet(its, its.num_prompts(terms))
    before = [len(log.steps) for log in read_steps(steps)]
    load = os.getloadavg()[0]
    emulated = uvloop.run(_rounds(its, terms, data, server.url, speed))
    ranks = [Summary.of(log.steps[old:]) for old, log in zip(before, read_steps(steps), strict=True)]
    conditions = RunConditions(data, its.machine, seed=its.seed, message_s=MESSAGE_S)
    outcome = replay_run(conditions, RoundSetting.of(terms))
    simulated = [
        RoundRow(
            each.kind, each.seconds, each.max_tokens, percentile(each.lengths, 75), each.generated_tokens,
            len(each.returned),
        )
        for each in outcome.rounds
    ]  # fmt: skip
    busy, idle = sum(rank.busy_s for rank in ranks), sum(rank.idle_s for rank in ranks)
    return {
        "prompt_speculation": terms.prompt_speculation,
        "response_speculation": terms.response_speculation,
        "emulated": summary_of(emulated),
        "simulated": summary_of(simulated),
        "idle_share": idle / (busy + idle),
        "load": load,
    }


async def _rounds(its: Workload, terms: RunTerms, data: EmulatedDataSet, url: str, speed: float) -> list[RoundRow]:
    rows = []
    async with AsyncRolloutClient(url) as client:
        run = await client.run(
            terms.group_size,
            terms.prompts_per_round,
            prompt_speculation=terms.prompt_speculation,
            response_speculation=terms.response_speculation,
            sampling={"max_tokens": its.max_tokens, "seed": FIRST_SEED},
            return_logprobs=False,
            return_text=False,
        )
        started = time.perf_counter()
        async for answer in run.rounds(data.in_order(its.seed)):
            seconds = (time.perf_counter() - started) * speed
            lengths = [trajectory.num_tokens for group in answer.groups for trajectory in group.trajectories]
            tokens = answer.usage.generated_tokens
            rows.append(
                RoundRow(answer.kind, seconds, max(lengths), percentile(lengths, 75), tokens, len(answer.groups))
            )
            started = time.perf_counter()
        await run.delete()
    return rows


def summary_of(rounds: list[RoundRow]) -> dict[str, Any]:
    short = [each for each in rounds if each.kind == "short"]
    seconds = sum(each.seconds for each in rounds)
    return {
        "seconds": seconds,
        "prompt_s": seconds / sum(each.num_returned for each in rounds),
        "short_longest": sum(each.longest for each in short) / len(short),
        "short_p75": sum(each.p75 for each in short) / len(short),
        "generated_tokens": sum(each.generated_tokens for each in rounds),
        "rounds": [each._asdict() for each in rounds],
    }


def table(result: dict[str, Any]) -> str:
    base = result["settings"][0]
    rows = []
    for row in result["settings"]:
        emulated, simulated = row["emulated"], row["simulated"]
        short_s = [each["seconds"] for each in emulated["rounds"] if each["kind"] == "short"]
        long_s = [each["seconds"] for each in emulated["rounds"] if each["kind"] == "long"]
        faster = [
            number(base[way]["prompt_s"] / row[way]["prompt_s"], 2) if base is not row else "1"
            for way in ("emulated", "simulated")
        ]
        rows.append(
            [
                f"{row['prompt_speculation']:g}", f"{row['response_speculation']:g}",
                number(sum(short_s) / len(short_s), 1), number(long_s[0] if long_s else None, 1), *faster,
                percent(simulated["seconds"] / emulated["seconds"] - 1, 1), number(emulated["short_longest"], 0),
                number(base["emulated"]["short_longest"] / emulated["short_longest"], 1),
                percent(row["idle_share"], 1),
            ]
        )  # fmt: skip
    its = result["workload"]
    title = (
        f"{its['model']['title']}, rounds of {its['prompts_per_round']} x {its['group_size']}, {its['ranks']} ranks, "
        f"speed {its['speed']:g}"
    )
    header = [
        "prompts x", "responses x", "short round, s", "long, s", "× faster, emulated", "simulated",
        "simulated seconds", "longest of a short round", "× shorter", "idle",
    ]  # fmt: skip
    return grid(title, header, rows)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rounds_emulated",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model", choices=MODEL_NAMES, default=MODEL_NAMES[0], help="step costs, lengths and cap (default %(default)s)"
    )
    add("--ranks", type=int, default=2, help="data-parallel engines (default %(default)s)")
    add("--prompts-per-round", type=int, default=32, help="P0 (default %(default)s)")
    add("--group-size", type=int, default=8, help="R0 (default %(default)s)")
    add("--settings", nargs="+", default=list(SETTINGS), help="PROMPTS,RESPONSES: speculation factors, 1,1 first")
    add("--speed", type=float, default=0.5, help="--emulate-speed of the server (default %(default)s)")
    add("--seed", type=int, default=3, help="default %(default)s")
    add("--output", type=Path, default=OUTPUT)
    return parser.parse_args()

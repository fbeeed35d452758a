"""Rounds at the scale of RollPacker's evaluation on an emulated device: `python -m benchmarks.rounds_emulated`.

Everything but the device is real: HTTP, runs, vLLM's scheduler and data-parallel engine cores, and cuts in the step
loop and across ranks. A setting is a pair of speculation factors, for prompts and for responses: 1,1 is plain
synchronous rounds. Each setting runs one period (the short rounds that fill a long one, and the long one). If nothing
is deferred, it runs two rounds. The simulator runs beside it, on the same lengths, step costs and order of prompts.

--speed 0.5 makes every step last twice as long, so that the host keeps up. Seconds are the device's: measured seconds
times the speed. `idle` is the share of time in which a device waited for the host although it had work.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from rich.console import Console

from benchmarks.common import percentile, publish, started
from benchmarks.emulated import (
    FIRST_SEED,
    EmulatedDataSet,
    Workload,
    emulated_server,
    record_of,
    title_of,
    workload_arguments,
    workload_of,
)
from benchmarks.rollpacker import MESSAGE_S
from benchmarks.tables import columns, number, percent
from vllm_rollout import AsyncRolloutClient
from vllm_rollout.parts.emulation.step_log import Summary, read_steps
from vllm_rollout.parts.rounds.rules.fields import RoundKind
from vllm_rollout.parts.rounds.rules.rounds import RunTerms
from vllm_rollout.parts.rounds.with_shaping.simulated.data import RunConditions
from vllm_rollout.parts.rounds.with_shaping.simulated.run_replay import replay_run
from vllm_rollout.parts.rounds.with_shaping.simulated.settings import RoundSetting
from vllm_rollout.process import ServerProcess, exit_on_sigterm

SETTINGS = ("1,1", "1,1.25", "1.25,1", "1.25,1.25", "1.5,1.5")
SYNCHRONOUS_ROUNDS = 2
"""Rounds of a setting in which nothing is deferred, so that all rounds are alike."""


class RoundRow(NamedTuple):
    """A round, emulated or simulated. Seconds are on the device's clock."""

    kind: RoundKind
    seconds: float
    longest: int
    p75: float
    generated_tokens: int
    num_returned: int


def main() -> None:
    parser = workload_arguments(__doc__, "rounds_emulated", ranks=2, prompts=32, speed=0.5)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), help="factors PROMPTS,RESPONSES; 1,1 is first")
    arguments = parser.parse_args()
    exit_on_sigterm()
    its = workload_of(arguments)
    result = record_of(its, __doc__) | {"settings": []}
    with tempfile.TemporaryDirectory() as folder, started(emulated_server(its, Path(folder))) as server:
        for setting in arguments.settings:
            row = measure(its, terms_of(its, *map(float, setting.split(","))), server, Path(folder) / "steps")
            result["settings"].append(row)
            Console(stderr=True).print(f"{setting}: {row['emulated']['seconds']:.1f} s", highlight=False)
    publish(arguments, result, table)


def terms_of(its: Workload, prompts: float, responses: float) -> RunTerms:
    return RunTerms(its.group_size, its.num_prompts, prompts, responses)


def num_prompts(terms: RunTerms) -> int:
    """Number of prompts of a period, or of `SYNCHRONOUS_ROUNDS` rounds if nothing is deferred."""
    return terms.num_period_prompts or SYNCHRONOUS_ROUNDS * terms.prompts_per_round


def measure(its: Workload, terms: RunTerms, server: ServerProcess, steps: Path) -> dict[str, Any]:
    """Measure one setting, emulated and simulated."""
    data = EmulatedDataSet(its, num_prompts(terms))
    before = [len(log.steps) for log in read_steps(steps)]
    load = os.getloadavg()[0]
    emulated = uvloop.run(_rounds(its, terms, data, server.url))
    ranks = [Summary.of(log.steps[old:]) for old, log in zip(before, read_steps(steps), strict=True)]
    busy, idle = sum(rank.busy_s for rank in ranks), sum(rank.idle_s for rank in ranks)
    return {
        "prompt_speculation": terms.prompt_speculation,
        "response_speculation": terms.response_speculation,
        "emulated": summary_of(emulated),
        "simulated": summary_of(simulated(its, terms, data)),
        "idle_share": idle / (busy + idle),
        "load": load,
    }


def simulated(its: Workload, terms: RunTerms, data: EmulatedDataSet) -> list[RoundRow]:
    conditions = RunConditions(data, its.machine, seed=its.seed, message_s=MESSAGE_S)
    return [
        RoundRow(
            each.kind,
            each.seconds,
            each.max_tokens,
            percentile(each.lengths, 75),
            each.generated_tokens,
            len(each.returned),
        )
        for each in replay_run(conditions, RoundSetting.of(terms)).rounds
    ]


async def _rounds(its: Workload, terms: RunTerms, data: EmulatedDataSet, url: str) -> list[RoundRow]:
    rows = []
    async with AsyncRolloutClient(url) as client:
        run = await client.run(
            terms.group_size,
            terms.prompts_per_round,
            prompt_speculation=terms.prompt_speculation,
            response_speculation=terms.response_speculation,
            sampling_params={"max_tokens": its.model.max_tokens, "seed": FIRST_SEED},
            include=[],
        )
        started = time.perf_counter()
        async for answer in run.rounds(data.in_order(its.seed)):
            seconds = (time.perf_counter() - started) * its.speed
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

    def mean_s(row: dict[str, Any], kind: RoundKind) -> str:
        seconds = [each["seconds"] for each in row["emulated"]["rounds"] if each["kind"] == kind]
        return number(sum(seconds) / len(seconds) if seconds else None, 1)

    def faster(row: dict[str, Any], way: str) -> str:
        return number(base[way]["prompt_s"] / row[way]["prompt_s"], 2) if row is not base else "1"

    return columns(title_of(result), result["settings"], {
        "prompts x": lambda row: f"{row['prompt_speculation']:g}",
        "responses x": lambda row: f"{row['response_speculation']:g}",
        "short round, s": lambda row: mean_s(row, "short"),
        "long, s": lambda row: mean_s(row, "long"),
        "× faster, emulated": lambda row: faster(row, "emulated"),
        "simulated": lambda row: faster(row, "simulated"),
        "simulated seconds": lambda row: percent(row["simulated"]["seconds"] / row["emulated"]["seconds"] - 1, 1),
        "longest of a short round": lambda row: number(row["emulated"]["short_longest"], 0),
        "× shorter": lambda row: number(base["emulated"]["short_longest"] / row["emulated"]["short_longest"], 1),
        "idle": lambda row: percent(row["idle_share"], 1),
    })  # fmt: skip


if __name__ == "__main__":
    main()

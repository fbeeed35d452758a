"""Which rank a group goes to, in the simulator: how long rollouts take by each rule.

No GPU and no engine: synchronous rollouts of prompts of 8 answers on eight ranks, on the machines and with lengths of
`benchmarks/rounds_simulated/setup.py`. The same prompts come back in every rollout. Of the first one nothing is known,
so it is placed by candidates in every way and left out; later ones by what was seen before them.

candidates  the rank with the fewest
tokens      the fewest predicted output tokens to come: what a server without a profile does
predicted   the same, weighed by what a token and its context cost: what a server with a profile does
real        the same, had lengths been known

Run from the repository root: python -m benchmarks.placement_simulated
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, geometric_mean, median
from typing import Any, get_args

from rich.progress import track

from benchmarks.common import arguments_of, record_of_run, write_json
from benchmarks.rounds_simulated.setup import (
    BETWEEN_SHARE,
    GPU_SOURCE,
    GROUP_SIZE,
    MODEL_NAMES,
    MODELS,
    OTHER_SHARES,
    PROMPTS_PER_ROUND,
    lengths,
)
from benchmarks.tables import grid, number
from vllm_rollout.simulator.generate import LengthDistribution, generate
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.pool import Pools
from vllm_rollout.simulator.replay import PlacedBy, replay
from vllm_rollout.simulator.settings import Setting
from vllm_rollout.trace.rows import Trace

STEPS = 4
"""Rollouts in a row, of the same prompts."""
NUM_RANKS = 8
MANY_PROMPTS = 3 * PROMPTS_PER_ROUND
"""Beside the paper's number: more groups per rank."""
WAYS: tuple[PlacedBy, ...] = get_args(PlacedBy)


def seconds(its: LengthDistribution, machine: Machine, seed: int) -> dict[PlacedBy, float]:
    """Of all rollouts but the first."""
    trace, setting = generate(its, seed), Setting(its.candidates)
    first_s = replay(Pools(Trace(trace.rollouts[:1]), seed), setting, machine, seed=seed).seconds
    pools = Pools(trace, seed)
    return {way: replay(pools, setting, machine, seed=seed, placed_by=way).seconds - first_s for way in WAYS}


def row(way: PlacedBy, seeds: Sequence[dict[PlacedBy, float]]) -> dict[str, Any]:
    """One way against placing by candidates."""
    ratios = [seed[way] / seed["candidates"] for seed in seeds]
    return {
        "way": way,
        "rollout_s": fmean(seed[way] for seed in seeds) / (STEPS - 1),
        "time_against_candidates": median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "ratios": ratios,
    }


def over_all(rows: Sequence[dict[str, Any]]) -> dict[PlacedBy, dict[str, float]]:
    """Of all cases and seeds: the geometric mean of the ratios, and how many of them are not longer."""
    ratios = {way: [ratio for one in rows if one["way"] == way for ratio in one["ratios"]] for way in WAYS}
    return {
        way: {"mean": geometric_mean(its), "share_not_longer": fmean(ratio <= 1 for ratio in its)}
        for way, its in ratios.items()
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    where = ["model", "prompts", "between prompts", "placed by"]
    return grid(
        f"Rollouts of {GROUP_SIZE} answers per prompt on {NUM_RANKS} ranks, medians over seeds",
        [*where, "s", "x time", "least", "most"],
        [
            [
                one["model"],
                number(one["prompts"]),
                number(one["between_prompts"], 2),
                one["way"],
                number(one["rollout_s"], 1),
                *(number(one[name]) for name in ("time_against_candidates", "least", "most")),
            ]
            for one in rows
        ],
    )


def main() -> None:
    arguments = arguments_of(__doc__, "placement_simulated", repeats=6).parse_args()
    record = record_of_run(
        seed=0,
        workload={
            "rollouts": f"{STEPS} in a row of prompts of {GROUP_SIZE} answers on {NUM_RANKS} ranks, the first left out",
            "seeds": arguments.repeats,
            "gpu": GPU_SOURCE,
        },
    )
    cases = [
        (name, between, prompts)
        for name in MODEL_NAMES
        for between in (BETWEEN_SHARE, OTHER_SHARES[1])
        for prompts in (PROMPTS_PER_ROUND, MANY_PROMPTS)
    ]
    record["rows"] = []
    for name, between, prompts in track(cases, "cases"):
        machine = replace(MODELS[name].machine, num_ranks=NUM_RANKS)
        its = replace(lengths(name, between, prompts), candidates=GROUP_SIZE, steps=STEPS)
        seeds = [seconds(its, machine, seed) for seed in range(arguments.repeats)]
        about = {"model": name, "between_prompts": between, "prompts": prompts}
        record["rows"] += [about | row(way, seeds) for way in WAYS]
    record["over_all"] = over_all(record["rows"])
    write_json(arguments.output, record)
    print(table(record["rows"]))
    print(record["over_all"])


if __name__ == "__main__":
    main()

"""Groups that move between ranks at the scale of RollPacker's evaluation, in the simulator: what moves cost and free.

No GPU and no engine: synchronous rollouts of 128 prompts of 8 answers, on the machines and with the lengths of
`benchmarks/rounds_simulated/setup.py`. The first rollout predicts from ages alone, later ones from the lengths seen.

stay         groups stay where they were placed
spread       groups leave a rank that lags, so that the rollout ends sooner
consolidate  ranks are emptied in the tail and freed
scale-down   half of the ranks are freed between 20 and 50 % of the responses (RollPacker 4.4)
both         scale-down, then consolidate

Run from the repository root: python -m benchmarks.moves_simulated
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

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
from benchmarks.tables import grid, number, percent
from vllm_rollout.simulator.generate import LengthDistribution, generate
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.outcome import Outcome
from vllm_rollout.simulator.pool import Pools
from vllm_rollout.simulator.replay import replay
from vllm_rollout.simulator.settings import Setting

STEPS = 4
"""Rollouts in a row, of the same prompts."""
FEW_RANKS = 4
"""Beside the paper's number: more groups per rank."""
WAYS: dict[str, dict[str, Any]] = {
    "stay": {},
    "spread": {"migration": "spread"},
    "consolidate": {"migration": "consolidate"},
    "scale-down": {"scale_down": "auto"},
    "both": {"migration": "consolidate", "scale_down": "auto"},
}


def outcomes(its: LengthDistribution, machine: Machine, seed: int) -> dict[str, Outcome]:
    pools = Pools(generate(its, seed), seed)
    setting = Setting(its.candidates)
    return {way: replay(pools, setting, replace(machine, **flags), seed=seed) for way, flags in WAYS.items()}


def row(way: str, seeds: Sequence[dict[str, Outcome]]) -> dict[str, Any]:
    """One way against staying: medians over seeds. Answers have to be the same."""
    its, stays = [seed[way] for seed in seeds], [seed["stay"] for seed in seeds]
    assert all(a.returned_lengths == b.returned_lengths for a, b in zip(its, stays, strict=True))
    times = [a.seconds / b.seconds for a, b in zip(its, stays, strict=True)]
    return {
        "way": way,
        "rollout_s": fmean(outcome.seconds for outcome in its) / STEPS,
        "time_against_staying": median(times),
        "least": min(times),
        "most": max(times),
        "busy_share": median(outcome.busy_share for outcome in its),
        "freed_share": median(outcome.freed_share for outcome in its),
        "busy_against_staying": median(a.busy_rank_s / b.busy_rank_s for a, b in zip(its, stays, strict=True)),
        "moves_per_rollout": fmean(outcome.num_moves for outcome in its) / STEPS,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    where = ["model", "ranks", "between prompts", "way"]
    what = ["s", "x time", "least", "most", "busy", "freed", "x busy", "moves"]
    return grid(
        f"Rollouts of {PROMPTS_PER_ROUND} x {GROUP_SIZE} answers, medians over seeds; x: against staying",
        [*where, *what],
        [
            [
                one["model"],
                number(one["num_ranks"]),
                number(one["between_prompts"], 2),
                one["way"],
                number(one["rollout_s"], 1),
                *(number(one[name]) for name in ("time_against_staying", "least", "most")),
                percent(one["busy_share"]),
                percent(one["freed_share"]),
                number(one["busy_against_staying"], 2),
                number(one["moves_per_rollout"], 1),
            ]
            for one in rows
        ],
    )


def main() -> None:
    arguments = arguments_of(__doc__, "moves_simulated", repeats=5).parse_args()
    record = record_of_run(
        seed=0,
        workload={
            "rollouts": f"{STEPS} in a row of {PROMPTS_PER_ROUND} prompts of {GROUP_SIZE} answers",
            "seeds": arguments.repeats,
            "gpu": GPU_SOURCE,
        },
    )
    cases = [
        (name, between, ranks)
        for name in MODEL_NAMES
        for between in (BETWEEN_SHARE, OTHER_SHARES[1])
        for ranks in (MODELS[name].num_ranks, FEW_RANKS)
    ]
    record["rows"] = []
    for name, between, ranks in track(cases, "cases"):
        machine = replace(MODELS[name].machine, num_ranks=ranks)
        its = replace(lengths(name, between, PROMPTS_PER_ROUND), candidates=GROUP_SIZE, steps=STEPS)
        seeds = [outcomes(its, machine, seed) for seed in range(arguments.repeats)]
        about = {"model": name, "between_prompts": between, "num_ranks": ranks}
        record["rows"] += [about | row(way, seeds) for way in WAYS]
    write_json(arguments.output, record)
    print(table(record["rows"]))


if __name__ == "__main__":
    main()

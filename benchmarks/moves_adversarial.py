"""By how much moves make a step later where lengths were chosen to mislead their predictions, in the simulator.

100 workloads of two rollouts each, drawn by number: of the first nothing is known before, the second has the history of
the first. Lengths are of seven kinds (`KINDS`), machines are those of `benchmarks/rounds_simulated/setup.py` and one
whose steps grow with every candidate, as a CPU's do; 2 to 16 ranks, 1 to 16 groups on each. Each rollout is a step of
its own: its time with moves is held against its time without, answers are the same.

Run from the repository root: python -m benchmarks.moves_adversarial

Invariant: the same numbers for the same seed, and no timing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks.common import arguments_of, record_of_run, write_json
from benchmarks.rounds_simulated.setup import MODEL_NAMES, MODELS
from benchmarks.tables import grid, number, percent
from vllm_rollout.group.cost import CostModel, PTLCurve
from vllm_rollout.group.migration import MAX_DELAY
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.pool import Pools
from vllm_rollout.simulator.replay import replay
from vllm_rollout.simulator.settings import Setting
from vllm_rollout.trace.rows import Trace, TracedCandidate, TracedPrompt, TracedRollout

NUM_WORKLOADS = 100
CPU = Machine(CostModel(((0.0, PTLCurve((1.0, 64.0), (0.02, 0.1))),), prefill_s_per_token=0.0008), max_num_seqs=512)
"""Five times as long with 64 candidates as with one, and a prefill that is half as dear as decoding."""
WAYS: dict[str, dict[str, Any]] = {"consolidate": {"migration": "consolidate"}, "scale-down": {"scale_down": "auto"}}

Draw = Callable[[Random, int, int], float]
"""Length over the usual one, from chance, the prompt's number and the rollout's."""


def _spread(chance: Random, sigma: float) -> float:
    return math.exp(sigma * chance.gauss(0, 1))


KINDS: dict[str, Draw] = {
    "a tenth of the answers is 12 times as long": lambda c, p, r: _spread(c, 0.4) * (12 if c.random() < 0.1 else 1),
    "a tenth of the prompts is 12 times as long": lambda c, p, r: _spread(c, 0.3) * (12 if p % 10 == 0 else 1),
    "all equally long": lambda c, p, r: _spread(c, 0.03),
    "log-normal, sigma 1.4": lambda c, p, r: _spread(c, 1.4),
    "a third runs to the cap": lambda c, p, r: 1e6 if c.random() < 1 / 3 else _spread(c, 0.5),
    "three tenths are 5 times as long": lambda c, p, r: _spread(c, 0.25) * (5 if c.random() < 0.3 else 1),
    "a tenth is 12 times as long, in the second rollout only": lambda c, p, r: (
        _spread(c, 0.4) * (12 if r and c.random() < 0.1 else 1)
    ),
}


class Workload(NamedTuple):
    kind: str
    device: str
    machine: Machine
    group_size: int
    trace: Trace


def workload(seed: int) -> Workload:
    chance = Random(f"{seed}/adversarial")
    kind = list(KINDS)[seed % len(KINDS)]
    device = chance.choice([*MODEL_NAMES, "CPU"])
    machine = replace(CPU if device == "CPU" else MODELS[device].machine, num_ranks=chance.choice((2, 4, 8, 16)))
    group_size = chance.choice((4, 8, 16))
    num_prompts = machine.num_ranks * min(chance.choice((1, 2, 4, 8, 16)), 512 // (machine.num_ranks * group_size) or 1)
    usual = chance.choice((150, 300, 600))
    max_tokens = 4096 if device == "CPU" else MODELS[device].max_tokens

    def prompt(name: int, rollout: int) -> TracedPrompt:
        lengths = (
            min(max_tokens, max(1, round(usual * KINDS[kind](chance, name, rollout)))) for _ in range(group_size)
        )
        candidates = tuple(TracedCandidate(n, "length" if n == max_tokens else "stop") for n in lengths)
        return TracedPrompt(str(name), candidates, 200, max_tokens)

    rollouts = tuple(TracedRollout(tuple(prompt(name, r) for name in range(num_prompts))) for r in range(2))
    return Workload(kind, device, machine, group_size, Trace(rollouts))


def measure(seed: int) -> list[dict[str, Any]]:
    """Of each way, and of both rollouts."""
    its = workload(seed)

    def totals(machine: Machine) -> list[tuple[float, float, float]]:
        """Seconds, busy and freed rank-seconds after no, one and two rollouts."""
        sums = [(0.0, 0.0, 0.0)]
        for count in (1, 2):
            pools = Pools(Trace(its.trace.rollouts[:count]), seed)
            outcome = replay(pools, Setting(its.group_size), machine, seed=seed)
            sums.append((outcome.seconds, outcome.busy_rank_s, outcome.freed_share * outcome.seconds))
        return sums

    stays = totals(its.machine)
    rows = []
    for way, flags in WAYS.items():
        moves = totals(replace(its.machine, **flags))
        for rollout, ((a, b), (x, y)) in enumerate(zip(pairwise(stays), pairwise(moves), strict=True)):
            seconds = y[0] - x[0]
            rows.append(
                {
                    "workload": seed,
                    "kind": its.kind,
                    "device": its.device,
                    "num_ranks": its.machine.num_ranks,
                    "num_candidates": len(its.trace.rollouts[0].prompts) * its.group_size,
                    "rollout": rollout,
                    "way": way,
                    "time_against_staying": seconds / (b[0] - a[0]),
                    "busy_against_staying": (y[1] - x[1]) / (b[1] - a[1]),
                    "freed_share": (y[2] - x[2]) / seconds,
                }
            )
    return rows


def row(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one way and one of the two rollouts, over all workloads."""
    times = sorted(one["time_against_staying"] for one in measured)
    worst = max(measured, key=lambda one: one["time_against_staying"])
    return {
        "way": measured[0]["way"],
        "is_history_known": bool(measured[0]["rollout"]),
        "median": median(times),
        "p95": times[math.ceil(0.95 * len(times)) - 1],
        "most": times[-1],
        "most_of": {name: worst[name] for name in ("kind", "device", "num_ranks", "num_candidates")},
        "over_bound": sum(time > 1 + MAX_DELAY for time in times),
        "busy_against_staying": fmean(one["busy_against_staying"] for one in measured),
        "freed_share": fmean(one["freed_share"] for one in measured),
    }


def table(rows: Sequence[dict[str, Any]], num_workloads: int) -> str:
    over = f"over {percent(MAX_DELAY)}, of {num_workloads}"
    return grid(
        f"Steps of {num_workloads} workloads; x: against staying",
        ["way", "lengths seen", "x median", "95 %", "most", over, "x busy", "freed", "the longest"],
        [
            [
                one["way"],
                "before" if one["is_history_known"] else "none",
                *(number(one[name]) for name in ("median", "p95", "most")),
                number(one["over_bound"]),
                number(one["busy_against_staying"], 2),
                percent(one["freed_share"]),
                "{kind}; {device}, {num_ranks} ranks, {num_candidates} candidates".format(**one["most_of"]),
            ]
            for one in rows
        ],
    )


def main() -> None:
    arguments = arguments_of(__doc__, "moves_adversarial", repeats=NUM_WORKLOADS)
    record = record_of_run(seed=0, workload={"workloads": arguments.repeats, "kinds": list(KINDS)})
    with ProcessPoolExecutor() as pool:
        measured = [one for each in pool.map(measure, range(arguments.repeats)) for one in each]
    record["rows"] = [
        row([one for one in measured if (one["way"], one["rollout"]) == (way, rollout)])
        for way in WAYS
        for rollout in range(2)
    ]
    write_json(arguments.output, record)
    print(table(record["rows"], arguments.repeats))


if __name__ == "__main__":
    main()

"""How many spares pay where not all candidates have places: `python -m benchmarks.redundancy_places`.

Simulated on the device and with the lengths of `benchmarks.launch_order`: races of 64 prompts, 8 answers wanted of
each and up to 8 spares, with 32 to 512 places. Seconds of the second and third epoch over those with 8 spares, medians
of the seeds; *auto* learns lengths in the first one, as a server does.
"""

from __future__ import annotations

from typing import Any, Literal

from rich.console import Console
from rich.progress import track

from benchmarks.common import arguments_of, median, publish, record_of_run
from benchmarks.launch_order import DEVICE, MAX_TOKENS, MEDIAN_TOKENS, NUM_PROMPTS, Seconds, trace_of
from benchmarks.tables import columns, number
from vllm_rollout.emulation.device import cost_of
from vllm_rollout.emulation.settings import Settings
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.race import Pools
from vllm_rollout.simulator.replay import replay
from vllm_rollout.simulator.settings import Setting
from vllm_rollout.trace.rows import Trace

GROUP_SIZE, MOST = 8, 8
Redundancy = int | Literal["auto"]
COMPARED: tuple[Redundancy, ...] = (0, 4, "auto")
SIGMAS = ((0.5, 0.5), (0.5, 1.0), (0.5, 1.4))
PLACES = (32, 64, 128, 256, 512)


def main() -> None:
    arguments = arguments_of(__doc__, "redundancy_places", seed=1, repeats=8).parse_args()
    workload = {
        "conditions": __doc__, "device": DEVICE, "prompts": NUM_PROMPTS, "group_size": GROUP_SIZE, "spares": MOST,
        "sigmas": SIGMAS, "median_tokens": MEDIAN_TOKENS, "max_tokens": MAX_TOKENS, "places": PLACES,
    }  # fmt: skip
    begun = record_of_run(seed=arguments.seed, workload=workload)
    cells = [(places, sigmas) for places in PLACES for sigmas in SIGMAS]
    rows = []
    for places, sigmas in track(cells, console=Console(stderr=True)):
        machine = Machine(cost_of(Settings.model_validate(DEVICE)), 1, places)
        traces = [trace_of(sigmas, arguments.seed + repeat) for repeat in range(arguments.repeats)]
        most = [seconds_of(machine, trace, MOST) for trace in traces]
        ratios = {
            str(redundancy): [
                seconds_of(machine, trace, redundancy) / of for trace, of in zip(traces, most, strict=True)
            ]
            for redundancy in COMPARED
        }
        rows.append({"places": places, "sigmas": sigmas, "ratios": ratios})
    publish(arguments, {**begun, "cells": rows}, tables)


def seconds_of(machine: Machine, trace: Trace, redundancy: Redundancy) -> float:
    """Of the second and third epoch."""
    recording = Seconds(trace)
    replay(Pools(trace), Setting(GROUP_SIZE, redundancy), machine, recording=recording)
    return sum(recording.taken[1:3])


def tables(result: dict[str, Any]) -> str:
    return columns("Seconds of races over those with 8 spares beside 8", result["cells"], {
        "places": lambda cell: str(cell["places"]),
        "sigma between, within": lambda cell: "{}, {}".format(*cell["sigmas"]),
        **{
            f"{name} spares": lambda cell, name=name: number(median(cell["ratios"][name]))
            for name in map(str, COMPARED)
        },
        "worst seed of auto": lambda cell: number(max(cell["ratios"]["auto"])),
    })  # fmt: skip


if __name__ == "__main__":
    main()

"""The order in which groups start, and when the last one ends: `python -m benchmarks.launch_order`.

Simulated on an emulated 7B model: 64 prompts of 16 answers, which are all awaited, with fewer places than candidates.
Lengths are log-normal between prompts and within them, around 1,000 tokens, 16,384 at most. There are three epochs of
the same prompts. Before the fourth, an update gives each prompt the lengths of another prompt, so that all histories
are wrong. One more epoch follows. Each number is a rollout's seconds over those of the same rollout in the order of its
prompts, the median over seeds. *mean* and *worst seed* are over epochs with a correct history. So is *all known*:
groups start by the true mean of their lengths, the longest first.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.common import arguments_of, median, publish, record_of_run
from benchmarks.tables import columns, number
from vllm_rollout.kernel.rules.fields import LaunchRule
from vllm_rollout.parts.emulation.device import cost_of
from vllm_rollout.parts.emulation.settings import Settings
from vllm_rollout.parts.page.simulated import Ran, Recording
from vllm_rollout.parts.shaping.rules.trace import Trace, TracedCandidate, TracedPrompt, TracedRollout
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.race import Pools
from vllm_rollout.simulator.replay import replay
from vllm_rollout.simulator.settings import Setting

DEVICE = {"step": {"ms": 5.2, "ms_per_request": 0.012, "ms_per_context_token": 2e-5, "ms_per_prefilled_token": 0.03}}
NUM_PROMPTS, GROUP_SIZE, MAX_TOKENS, MEDIAN_TOKENS = 64, 16, 16_384, 1000
SIGMAS = ((0.5, 0.5), (0.5, 1.0), (1.0, 0.5), (1.0, 1.0), (0.5, 1.4), (1.4, 1.4))
"""Standard deviations of log lengths between prompts and within them."""
PLACES = (512, 256, 64)
EPOCHS = ("no history", "1 epoch", "2 epochs", "lying", "after lies")


def main() -> None:
    parser = arguments_of(__doc__, "launch_order", seed=1, repeats=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 8), help="numbers of ranks (default %(default)s)")
    arguments = parser.parse_args()
    workload = {
        "conditions": __doc__, "device": DEVICE, "prompts": NUM_PROMPTS, "group_size": GROUP_SIZE, "sigmas": SIGMAS,
        "median_tokens": MEDIAN_TOKENS, "max_tokens": MAX_TOKENS, "places": PLACES, "epochs": EPOCHS,
    }  # fmt: skip
    begun = record_of_run(seed=arguments.seed, workload=workload)
    fitting = [(ranks, places) for ranks in arguments.ranks for places in PLACES if places // ranks >= GROUP_SIZE]
    cells = [(*fit, sigmas) for fit in fitting for sigmas in SIGMAS]
    seeds = range(arguments.seed, arguments.seed + arguments.repeats)
    rows = []
    for ranks, places, sigmas in track(cells, console=Console(stderr=True)):
        machine = Machine(cost_of(Settings.model_validate(DEVICE)), ranks, places // ranks)
        traces = [trace_of(sigmas, seed) for seed in seeds]
        plain = [seconds_of(machine, trace, "prompts") for trace in traces]
        chosen = [seconds_of(machine, trace, "auto") for trace in traces]
        known = [seconds_of(machine, longest_first(trace), "prompts") for trace in traces]
        rows.append({
            "ranks": ranks, "places": places, "sigmas": sigmas,
            "ratios": [quotients(*each) for each in zip(chosen, plain, strict=True)],
            "all_known": [quotients(*each) for each in zip(known, plain, strict=True)],
        })  # fmt: skip
    publish(arguments, {**begun, "cells": rows}, tables)


def trace_of(sigmas: tuple[float, float], seed: int) -> Trace:
    between, within = sigmas
    chance = Random(seed)
    medians = [MEDIAN_TOKENS * chance.lognormvariate(0, between) for _ in range(NUM_PROMPTS)]
    others = chance.sample(medians, len(medians))

    def prompt(number: int, median: float) -> TracedPrompt:
        lengths = [min(MAX_TOKENS, max(1, round(median * chance.lognormvariate(0, within)))) for _ in range(GROUP_SIZE)]
        candidates = [TracedCandidate(length, "length" if length == MAX_TOKENS else "stop") for length in lengths]
        return TracedPrompt(str(number), tuple(candidates), prompt_tokens=100, max_tokens=MAX_TOKENS)

    epochs = [medians, medians, medians, others, others]
    return Trace(tuple(TracedRollout(tuple(prompt(*each) for each in enumerate(epoch))) for epoch in epochs))


def longest_first(trace: Trace) -> Trace:
    def true_mean(prompt: TracedPrompt) -> float:
        return fmean(candidate.num_tokens for candidate in prompt.candidates)

    return Trace(
        tuple(TracedRollout(tuple(sorted(each.prompts, key=true_mean, reverse=True))) for each in trace.rollouts)
    )


class Seconds(Recording):
    """Collects the seconds of each rollout."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace, in_steps=False)
        self.taken: list[float] = []

    def add(self, ran: Ran) -> None:
        self.taken.append(ran.run.seconds)


def seconds_of(machine: Machine, trace: Trace, order: LaunchRule) -> list[float]:
    recording = Seconds(trace)
    replay(Pools(trace), Setting(GROUP_SIZE, order=order), machine, recording=recording)
    return recording.taken


def quotients(seconds: list[float], of: list[float]) -> list[float]:
    return [one / other for one, other in zip(seconds, of, strict=True)]


def tables(result: dict[str, Any]) -> str:
    def true(cell: dict[str, Any], name: str = "ratios") -> list[float]:
        return [ratio for ratios in cell[name] for ratio in ratios[1:3]]

    cells: dict[str, Callable[[dict[str, Any]], str]] = {
        "ranks": lambda cell: str(cell["ranks"]),
        "places": lambda cell: str(cell["places"]),
        "sigma between, within": lambda cell: "{}, {}".format(*cell["sigmas"]),
    }
    for number_of_epoch, epoch in enumerate(EPOCHS):
        cells[epoch] = lambda cell, n=number_of_epoch: number(median(ratios[n] for ratios in cell["ratios"]))
    cells["mean"] = lambda cell: number(fmean(true(cell)))
    cells["worst seed"] = lambda cell: number(max(true(cell)))
    cells["all known"] = lambda cell: number(fmean(true(cell, "all_known")))
    return columns("Seconds of rollouts whose groups start in the order that is chosen", result["cells"], cells)


if __name__ == "__main__":
    main()

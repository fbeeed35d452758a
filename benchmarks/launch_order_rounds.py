"""In which order the prompts of rounds start: `python -m benchmarks.launch_order_rounds`.

Simulated on the emulated 7B model of `launch_order`: runs of three epochs over 256 prompts, 64 per round in groups of
8, with fewer places than candidates. Rounds that wait for all their prompts start them in the order that is chosen by
lengths of earlier epochs, or as they come. Without speculation every round waits for all; with 1.25 times the prompts
and answers the long ones do. Seconds of the rounds after the first epoch over those of the same run whose prompts start
as they come, the median of the seeds and their range.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.common import arguments_of, median, publish, record_of_run
from benchmarks.launch_order import DEVICE, MAX_TOKENS, MEDIAN_TOKENS, SIGMAS
from benchmarks.tables import columns, number
from vllm_rollout.emulation.device import cost_of
from vllm_rollout.emulation.settings import Settings
from vllm_rollout.group.plans.fields import LaunchRule
from vllm_rollout.group.rounds.rounds import RunTerms
from vllm_rollout.simulator.generate import LengthDistribution
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.rounds.data import GeneratedDataSet, RunConditions
from vllm_rollout.simulator.rounds.outcome import RoundOutcome
from vllm_rollout.simulator.rounds.replay import replay_run
from vllm_rollout.simulator.rounds.settings import RoundSetting

NUM_PROMPTS, PER_ROUND, GROUP_SIZE, EPOCHS = 256, 64, 8, 3
PLACES = (256, 128)
SPECULATIONS = (1.0, 1.25)


def main() -> None:
    arguments = arguments_of(__doc__, "launch_order_rounds", seed=1, repeats=8).parse_args()
    workload = {
        "conditions": __doc__, "device": DEVICE, "prompts": NUM_PROMPTS, "prompts_per_round": PER_ROUND,
        "group_size": GROUP_SIZE, "epochs": EPOCHS, "sigmas": SIGMAS, "median_tokens": MEDIAN_TOKENS,
        "max_tokens": MAX_TOKENS, "places": PLACES, "speculations": SPECULATIONS,
    }  # fmt: skip
    begun = record_of_run(seed=arguments.seed, workload=workload)
    seeds = range(arguments.seed, arguments.seed + arguments.repeats)
    cells = [(places, sigmas, speculation) for places in PLACES for sigmas in SIGMAS for speculation in SPECULATIONS]
    measured = [
        {
            "places": places, "sigmas": sigmas, "speculation": speculation,
            "seeds": [measure(places, sigmas, speculation, seed) for seed in seeds],
        }
        for places, sigmas, speculation in track(cells, console=Console(stderr=True))
    ]  # fmt: skip
    publish(arguments, {**begun, "cells": measured}, tables)


def measure(places: int, sigmas: tuple[float, float], speculation: float, seed: int) -> dict[str, dict[str, float]]:
    between, within = sigmas
    distribution = LengthDistribution(
        NUM_PROMPTS, median=MEDIAN_TOKENS, prompt_sigma=between, sigma=within, max_tokens=MAX_TOKENS
    )
    machine = Machine(cost_of(Settings.model_validate(DEVICE)), 1, places)
    conditions = RunConditions(GeneratedDataSet(distribution, seed), machine, EPOCHS, seed, whole_epochs=True)
    plain = RoundSetting.of(RunTerms(GROUP_SIZE, PER_ROUND, speculation, speculation))

    def seconds(order: LaunchRule) -> dict[str, float]:
        setting = replace(plain, group=replace(plain.group, order=order))
        return by_kind(replay_run(conditions, setting).rounds)

    return {"auto": seconds("auto"), "prompts": seconds("prompts")}


def by_kind(rounds: Iterable[RoundOutcome]) -> dict[str, float]:
    """Seconds of rounds of which at least one prompt had come back before."""
    later = [each for each in rounds if any(prompt.epoch > 0 for prompt in each.returned)]
    return {
        "all": sum(each.seconds for each in later),
        "long": sum(each.seconds for each in later if each.kind == "long"),
    }


def tables(result: dict[str, Any]) -> str:
    def ratios(kind: str) -> Any:
        def said(cell: dict[str, Any]) -> str:
            if cell["speculation"] == 1.0 and kind == "long":
                return ""
            found = [each["auto"][kind] / each["prompts"][kind] for each in cell["seeds"]]
            return f"{number(median(found), 3)} ({number(min(found), 3)} to {number(max(found), 3)})"

        return said

    cells = {
        "places": lambda cell: str(cell["places"]),
        "sigma between, within": lambda cell: "{}, {}".format(*cell["sigmas"]),
        "speculation": lambda cell: f"{cell['speculation']:g}",
        "all rounds": ratios("all"),
        "long rounds": ratios("long"),
    }
    return columns("Seconds of rounds whose prompts start in the order that is chosen", result["cells"], cells)


if __name__ == "__main__":
    main()

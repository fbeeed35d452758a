"""Logged runs -> the numbers of each phase. Invariant: pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.pruning.measures import (
    calibration,
    compare_survivors,
    correct_by_prompt,
    discrimination,
    learning_curve,
    overview,
    random_in_expectation,
    speed,
    survivors,
)
from benchmarks.pruning.phases import COMPARED, FEWER, SWEPT
from benchmarks.pruning.records import Run, records_of
from benchmarks.pruning.setup import Phase, Sizes

Runs = Mapping[Phase, Sequence[Run]]


def summarize(phase: Phase, sizes: Sizes, runs: Runs) -> dict[str, Any]:
    """The numbers of one phase. Raises: ValueError if a run that it needs is missing."""
    return SUMMARIES[phase](sizes, runs)


def _learn(sizes: Sizes, runs: Runs) -> dict[str, Any]:
    mine = _needed(runs, "learn")
    records = records_of(mine)
    counts = [run.rewards or {} for run in mine]
    return {
        "num_labels": sum(count.get("accepted", 0) for count in counts),
        "num_unscored": sum(count.get("unscored", 0) for count in counts),
        "num_requests": len(mine),
        "generated_tokens": sum(run.generated_tokens for run in mine),
        "seconds": max(run.started_s + run.wall_s for run in mine) - min(run.started_s for run in mine),
        "overview": overview(records),
        "learning_curve": learning_curve(records, sizes.window),
        "prequential": discrimination(records),
    }


def _evaluate(sizes: Sizes, runs: Runs) -> dict[str, Any]:
    records = records_of(_needed(runs, "evaluate"))
    return {
        "overview": overview(records),
        "head_version": max((record.head_version or 0 for record in records), default=0),
        "discrimination": discrimination(records),
        "calibration": calibration(records),
    }


def _compare(sizes: Sizes, runs: Runs) -> dict[str, Any]:
    mine = _needed(runs, "compare")
    ways = {way: correct_by_prompt(records_of(r for r in mine if r.key[0] == way)) for way in COMPARED}
    return {
        "ways": COMPARED,
        "survivors": {way: survivors(groups) for way, groups in ways.items()},
        "random_in_expectation": random_in_expectation(ways["none"], 0.5),
        "balance_minus": compare_survivors(ways, "balance"),
        "gradient_minus": compare_survivors(ways, "gradient"),
        "num_audits": {way: sum(run.num_audits for run in mine if run.key[0] == way) for way in COMPARED},
        "speed": speed(mine, list(COMPARED), "none"),
        "warnings": _warnings(mine),
    }


def _sweep(sizes: Sizes, runs: Runs) -> dict[str, Any]:
    mine = _needed(runs, "sweep")
    everyone = overview(records_of(run for run in mine if run.key[0] == "1.0"))
    return {
        "detection_length": sizes.detection_length,
        "overview_of_all": everyone,
        "mean_length_over_detection_length": (everyone["mean_tokens"] or 0) / sizes.detection_length,
        "speed": speed(mine, list(SWEPT), "1.0"),
        "warnings": _warnings(mine),
    }


def _fewer(sizes: Sizes, runs: Runs) -> dict[str, Any]:
    mine = _needed(runs, "fewer")
    ways = {way: correct_by_prompt(records_of(r for r in mine if r.key[0] == way)) for way in FEWER}
    return {
        "survivors": {way: survivors(groups) for way, groups in ways.items()},
        "speed": speed(mine, FEWER, "none"),
    }


SUMMARIES: Mapping[Phase, Callable[[Sizes, Runs], dict[str, Any]]] = {
    "learn": _learn,
    "evaluate": _evaluate,
    "compare": _compare,
    "sweep": _sweep,
    "fewer": _fewer,
}


def _needed(runs: Runs, phase: Phase) -> Sequence[Run]:
    if not runs[phase]:
        raise ValueError(f"phase {phase} has not run yet: run it first, with the same --output.")
    return runs[phase]


def _warnings(runs: Sequence[Run]) -> list[str]:
    return sorted({warning for run in runs for warning in run.warnings})

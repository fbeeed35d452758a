"""Logged runs -> what each phase says, and whether it reached its target. Invariant: pure; a miss is said as a miss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.pruning.measures import (
    accuracy,
    best_threshold,
    by_family,
    calibration,
    compare_survivors,
    correct_by_prompt,
    counterfactual,
    discrimination,
    learning_curve,
    overview,
    random_in_expectation,
    speed,
    survivors,
    votes,
)
from benchmarks.pruning.phases import COMPARED, FEWER, OVERHEAD, SWEPT
from benchmarks.pruning.records import SCORES, Record, Run, difference, records_of
from benchmarks.pruning.setup import Phase, Sizes

Runs = Mapping[Phase, Sequence[Run]]
VOTE_SIZES = (8, 16, 32)
RECENT_LABELS = 1000
"""Newest labels of `learn` on which thresholds are chosen: older ones were scored by a head that knew less."""


def summarize(phase: Phase, sizes: Sizes, runs: Runs) -> dict[str, Any]:
    """The numbers of one phase. Raises: ValueError when a run that it needs was never made."""
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
        "families": by_family(records),
        "learning_curve": learning_curve(records, sizes.window),
        "prequential": discrimination(records),
        "shadow": counterfactual(records, sizes.detection_length),
    }


def _evaluate(sizes: Sizes, runs: Runs) -> dict[str, Any]:
    records = records_of(_needed(runs, "evaluate"))
    learned = records_of(_needed(runs, "learn"))
    known = [record for record in learned if record.score_of("head") is not None][-RECENT_LABELS:]
    thresholds = {score: best_threshold(known, score) for score in SCORES}
    return {
        "overview": overview(records),
        "head_version": max((record.head_version or 0 for record in records), default=0),
        "discrimination": discrimination(records),
        "thresholds": thresholds,
        "accuracy": {score: accuracy(records, score, thresholds[score]) for score in SCORES},
        "calibration": calibration(records),
        "shadow": counterfactual(records, sizes.detection_length),
        "families": by_family(records),
    }


def _vote(sizes: Sizes, runs: Runs) -> dict[str, Any]:
    records = [record for run in _needed(runs, "evaluate") if run.key[0] == "vote" for record in run.records]
    return votes(records, VOTE_SIZES)


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
        "detection_length": sizes.sweep_detection_length,
        "overview_of_all": everyone,
        "mean_length_over_detection_length": (everyone["mean_tokens"] or 0) / sizes.sweep_detection_length,
        "speed": speed(mine, list(SWEPT), "1.0"),
        "signals": _signals(records_of(run for run in mine if run.key[0] in SWEPT)),
        "warnings": _warnings(mine),
    }


def _overhead(sizes: Sizes, runs: Runs) -> dict[str, Any]:
    mine = _needed(runs, "overhead")
    return {"ways": OVERHEAD, "speed": speed(mine, list(OVERHEAD), "not scored"), "warnings": _warnings(mine)}


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
    "vote": _vote,
    "compare": _compare,
    "sweep": _sweep,
    "overhead": _overhead,
    "fewer": _fewer,
}


def targets(phases: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every target of the issue whose phase has run."""
    found: list[dict[str, Any]] = []

    def above(name: str, value: float | None, target: float, strictly: bool = False) -> None:
        """At least, or where the name compares two ways, more than `target`; without a value nobody knows."""
        reached = None if value is None else value > target if strictly else value >= target
        found.append({"name": name, "value": value, "target": target, "reached": reached})

    if learned := phases.get("learn"):
        above("labels learned from", learned["num_labels"], 4000)
    if evaluated := phases.get("evaluate"):
        told = evaluated["discrimination"]
        above("AUC on held-out prompts", told["auc"]["head"]["value"], 0.65)
        above("AUC within groups", told["within_group_auc"]["head"]["value"], 0.62)
        over = [row["value"] for row in told["auc_head_above"].values()]
        above("AUC above the best confidence", None if None in over else min(over), 0.08)
    if compared := phases.get("compare"):
        for other in ("random", "none"):
            value = compared["balance_minus"][other]["mean_ratio_product"]["value"]
            above(f"E[rho_hat (1 - rho_hat)], balance minus {other}", value, 0.0, strictly=True)
        value = compared["gradient_minus"]["random"]["share_without_variance"]["value"]
        above("groups without variance, random minus gradient", None if value is None else -value, 0.0)
        rows = compared["survivors"]
        nearer = difference(rows["none"]["distance_from_half"], rows["balance"]["distance_from_half"])
        above("survivors' positive ratio nearer to 0.5 than all candidates', by", nearer, 0.0, strictly=True)
    if swept := phases.get("sweep"):
        above("mean length / detection length in sweep", swept["mean_length_over_detection_length"], 8.0)
        above("generation at keep_ratio 0.5, x none", swept["speed"]["0.5"]["speed_ratio"], 1.4)
    if cost := phases.get("overhead"):
        above("throughput, all scored / none scored", cost["speed"]["scored"]["throughput_ratio"], 0.98)
    return found


def _needed(runs: Runs, phase: Phase) -> Sequence[Run]:
    if not runs[phase]:
        raise ValueError(f"phase {phase} has not run yet: run it first, with the same --output.")
    return runs[phase]


def _warnings(runs: Sequence[Run]) -> list[str]:
    return sorted({warning for run in runs for warning in run.warnings})


def _signals(records: Sequence[Record]) -> dict[str, int]:
    """What candidates were judged by."""
    names = [record.signal or "not scored" for record in records]
    return {name: names.count(name) for name in sorted(set(names))}

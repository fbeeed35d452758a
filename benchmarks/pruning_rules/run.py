"""What pruning is worth with success probabilities that it learns itself: no model, no engine.

A GRPO whose true gradient is known (world.py), scores with an AUC, and everything else the code of the engine:
calibration learns from survivors' rewards, step by step (streams.py). Ways: none pruned; fewer, none pruned of as many
candidates as the others keep; random, paper, balance, gradient (the default); and gradient with audit groups, and
behind a head's swap. Is the default at least as good as random, fewer and none, in signal to noise per generated token?
Does the report advise the better of pruning and fewer?

Run from the repository root: python -m benchmarks.pruning_rules (some 10 minutes on one core; --quick, half a minute:
two cells, and errors to match).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

from rich.progress import track

from benchmarks.common import arguments_of, publish, record_of_run, with_error
from benchmarks.pruning_rules.streams import (
    DETECTION_SHARE,
    GROUPS_PER_STEP,
    PLAN,
    WAYS,
    Measures,
    measure,
    stream,
)
from benchmarks.pruning_rules.world import GROUP_SIZE, World
from benchmarks.tables import Row, columns, grid
from vllm_rollout.config import CALIBRATION_WINDOW
from vllm_rollout.group.judging.advice import Advice

SHARE = 0.5
"""Correlation of success with the direction of the gradient."""
CONCENTRATIONS = (3.0, 20.0)
"""Of prompts' success rates: at a mean of 0.5 they differ by 0.25, or by 0.11 (standard deviations)."""
AUCS = (0.5, 0.7, 0.85)
SUCCESS_RATES = (0.02, 0.1, 0.3, 0.5, 0.8)
MIN_LEARNING = round(CALIBRATION_WINDOW / PLAN.keep_ratio / GROUP_SIZE)
"""Groups whose survivors fill the window of labels."""
CELL = ("concentration", "auc", "rate")
DEFAULT = "gradient"
OTHERS = ("random", "fewer", "none")
COMPARED: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(OTHERS, ("quality", "per_token", "per_token_free")),
    DEFAULT: ("per_token",),
}
NUM_ERRORS = 2.0

Verdict = Literal["worse", "alike", "better", "unknown"]


def main() -> None:
    parser = arguments_of(__doc__, "pruning_rules", repeats=8)
    parser.add_argument("--groups", type=int, default=320, help="measured, of each seed (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two cells, 2 seeds of 32 groups")
    arguments = parser.parse_args()
    num_groups, num_seeds, min_learning = arguments.groups, arguments.repeats, MIN_LEARNING
    worlds = [World(SHARE, c, auc, rate) for c in CONCENTRATIONS for auc in AUCS for rate in SUCCESS_RATES]
    if arguments.quick:
        num_groups, num_seeds, min_learning = 32, 2, 16
        worlds = [World(SHARE, 3.0, 0.85, rate) for rate in (0.1, 0.5)]
    if num_seeds < 2 or num_groups < 2:
        parser.error("--repeats and --groups must be at least 2: there is no error of one")
    workload = {
        "groups": f"{num_seeds} seeds of {num_groups} groups of {GROUP_SIZE} per cell, after those that teach",
        "groups_per_step": GROUPS_PER_STEP,
        "detection_share": DETECTION_SHARE,
        "share": SHARE,
        "ways": {name: asdict(way) for name, way in WAYS.items()},
    }
    record = record_of_run(seed=arguments.seed, workload=workload)
    seeds = range(arguments.seed, arguments.seed + num_seeds)
    record["learned"] = rows = [
        row_of(world, measure_world(world, num_groups, min_learning, seeds)) for world in track(worlds, "cells")
    ]
    record["target"] = [
        target(rows, way, field)
        for way in ("gradient", "audits", "swap", "balance", "paper")
        for field in ("per_token", "per_token_free")
    ]
    publish(arguments, rounded(record), report)


class Found(NamedTuple):
    """By way, and of each seed."""

    measures: dict[str, list[Measures]]
    advice: list[Advice]
    """To who prunes by the default rule."""


def measure_world(world: World, num_groups: int, min_learning: int, seeds: Sequence[int]) -> Found:
    found = Found({name: [] for name in WAYS}, [])
    num_unmeasured = num_learning(world.rate, min_learning)
    measured = slice(num_unmeasured, None)
    for seed in seeds:
        groups = world.groups(num_unmeasured + num_groups, seed + 1)
        for name, way in WAYS.items():
            launched = groups.first(way.group_size)
            whole = stream(launched, way, num_unmeasured, seed)
            found.measures[name].append(measure(launched.part(measured), whole.part(measured), world.share))
            if name == DEFAULT and whole.advice is not None:
                found.advice.append(whole.advice)
    return found


def num_learning(rate: float, min_groups: int) -> int:
    """Groups that are not measured: twice a cold start, and at least so many."""
    rarer = min(rate, 1 - rate) * GROUP_SIZE
    return max(min_groups, math.ceil(2 * PLAN.min_labels / rarer))


def row_of(world: World, found: Found) -> dict[str, Any]:
    """Means with their standard errors over seeds, and of every way what it is worth beside the others."""
    row: dict[str, Any] = asdict(world)
    for name, measured in found.measures.items():
        row[name] = {field: _over_seeds(measured, field) for field in Measures.__slots__}
        for other, fields in COMPARED.items():
            others = found.measures[other]
            row[name][f"over_{other}"] = {
                field: ratio([getattr(m, field) for m in measured], [getattr(m, field) for m in others])
                for field in fields
            }
    values = [advice.value for advice in found.advice if advice.value is not None]
    cheaper = [advice.cheaper for advice in found.advice]
    row["advice"] = {
        "value": with_error(values) if len(values) > 1 else None,
        "prune": cheaper.count("prune"),
        "fewer": cheaper.count("fewer"),
    }
    return row


def _over_seeds(measured: Sequence[Measures], field: str) -> dict[str, float] | None:
    values = [value for each in measured if (value := getattr(each, field)) is not None]
    return with_error(values) if len(values) > 1 else None


def ratio(ours: Sequence[float], others: Sequence[float]) -> dict[str, float] | None:
    """Mean over mean of paired seeds, with its standard error to first order; None over nothing."""
    base = fmean(others)
    if base <= 0:
        return None
    found = fmean(ours) / base
    residuals = [a - found * b for a, b in zip(ours, others, strict=True)]
    return {"mean": found, "error": stdev(residuals) / base / math.sqrt(len(ours))}


def verdict(ratio: Mapping[str, float] | None) -> Verdict:
    """Beyond two standard errors; unknown where the other way has shown no gradient at all."""
    if ratio is None:
        return "unknown"
    margin = NUM_ERRORS * ratio["error"] + 1e-9
    return "worse" if ratio["mean"] < 1 - margin else "better" if ratio["mean"] > 1 + margin else "alike"


def target(rows: Sequence[Row], name: str, field: str = "per_token") -> dict[str, Any]:
    """Is this way nowhere worse than random, fewer or none by more than two standard errors?"""
    found = [
        {**{key: row[key] for key in CELL}, "than": other, "verdict": verdict(its), "ratio": its}
        for row in rows
        for other in OTHERS
        for its in [row[name][f"over_{other}"][field]]
    ]

    def num(other: str, *verdicts: Verdict) -> int:
        return sum(cell["than"] == other and cell["verdict"] in verdicts for cell in found)

    return {
        "way": name,
        "measure": field,
        "holds": {other: num(other, "alike", "better") for other in OTHERS},
        "better": {other: num(other, "better") for other in OTHERS},
        "num_cells": len(rows),
        "fails": [cell for cell in found if cell["verdict"] == "worse"],
    }


def rounded(value: Any) -> Any:
    """Floats of a result with six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def report(record: Row) -> str:
    """Every way beside none, the default beside the others, what is kept, and where the target holds."""
    rows = record["learned"]
    cell = {key: lambda row, key=key: f"{row[key]:g}" for key in CELL}
    beside_none = {way: lambda row, way=way: _shown(row[way]["over_none"]["per_token"]) for way in WAYS}
    beside = {
        f"{field}: × {other}": lambda row, other=other, field=field: _shown(row[DEFAULT][f"over_{other}"][field])
        for field in ("quality", "per_token", "per_token_free")
        for other in OTHERS
    }
    kept = ("keep_ratio", "positive_ratio", "reward_variance", "no_variance", "quality", "error_of_q")
    parts = [
        columns("Signal to noise per generated token, as multiples of none's", rows, cell | beside_none),
        columns("The default beside the others", rows, cell | beside | {"advised": _advised}),
    ]
    for way in WAYS:
        values = {field: lambda row, field=field, way=way: _shown(row[way][field], 3) for field in kept}
        parts.append(columns(f"What is kept: {way}", rows, cell | values))
    held = [
        [its["way"], its["measure"], *(f"{its['holds'][o]} ({its['better'][o]} better)" for o in OTHERS)]
        for its in record["target"]
    ]
    title = f"Cells of {len(rows)} that are at least as good within two standard errors"
    return "\n\n".join([*parts, grid(title, ["way", "measure", *(f"as {o}" for o in OTHERS)], held)])


def _shown(value: Mapping[str, float] | None, digits: int = 2) -> str:
    return "—" if value is None else f"{value['mean']:.{digits}f} ± {value['error']:.{digits}f}"


def _advised(row: Row) -> str:
    """The value that the report names, and what it advises over the seeds."""
    advice = row["advice"]
    votes = [f"{advice[setting]} × {setting}" for setting in ("prune", "fewer") if advice[setting]]
    return f"{_shown(advice['value'])}: {', '.join(votes) or '—'}"

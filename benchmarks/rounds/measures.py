"""Runs of `benchmarks.rounds` -> numbers. Invariant: pure; each ratio is within one repeat, then comes the median."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import median, percentile
from benchmarks.rounds.setup import BASELINE, WAY_NAMES, WayName
from vllm_rollout.parts.rounds.demo.rounds import Period, Round

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """A period of one way in one repeat."""

    key: tuple[str, int]
    """The way, and the number of the repeat."""
    started_s: float
    """Start in seconds of Unix time."""
    load: float
    """Load average of the machine over the minute before."""
    period: Period
    """Rounds with generated tokens by the engine's counter."""


def round_row(each: Round) -> Row:
    return {
        "name": each.name,
        "wall_s": each.seconds,
        "max_tokens": max(each.lengths),
        "p75_tokens": percentile(each.lengths, 75),
        "generated_tokens": each.generated_tokens,
        "returned_tokens": each.returned_tokens,
        "wasted_tokens": each.generated_tokens - each.returned_tokens,
        "num_returned": len(each.groups) - len(each.deferred),
        "deferred": each.deferred,
    }


def run_row(run: Run) -> Row:
    rounds = [round_row(each) for each in run.period.rounds]
    return {
        "way": run.key[0],
        "repeat": run.key[1],
        "started_s": run.started_s,
        "load": run.load,
        "rounds": rounds,
        **period_row(run.period, rounds),
    }


def period_row(period: Period, rounds: Sequence[Row]) -> Row:
    """Sums over the period, and averages over its rounds."""
    return {
        "wall_s": period.seconds,
        "mean_round_s": period.seconds / len(rounds),
        "mean_max_tokens": sum(row["max_tokens"] for row in rounds) / len(rounds),
        "mean_p75_tokens": sum(row["p75_tokens"] for row in rounds) / len(rounds),
        "generated_tokens": period.generated_tokens,
        "returned_tokens": period.generated_tokens - period.wasted_tokens,
        "wasted_tokens": period.wasted_tokens,
        "num_rounds": len(rounds),
        "short_rounds_s": _mean_s(period, "short"),
        "long_rounds_s": _mean_s(period, "long"),
    }


def _mean_s(period: Period, name: str) -> float | None:
    seconds = [each.seconds for each in period.rounds if each.name == name]
    return sum(seconds) / len(seconds) if seconds else None


def summarize(rows: Sequence[Row]) -> dict[WayName, Row]:
    """Medians over repeats, of values and of ratios within a repeat."""
    cells: Mapping[tuple[str, int], Row] = {(row["way"], row["repeat"]): row for row in rows}
    repeats = sorted({repeat for _, repeat in cells})
    ways: dict[WayName, Row] = {}
    for name in WAY_NAMES:
        mine = [cells[name, repeat] for repeat in repeats]
        speed = [cells[BASELINE, repeat]["wall_s"] / cells[name, repeat]["wall_s"] for repeat in repeats]
        fields = [field for field, value in mine[0].items() if isinstance(value, int | float)]
        plain = {field: median(row[field] for row in mine) for field in fields if field not in ("repeat", "started_s")}
        ways[name] = {**plain, "speed_up": median(speed), "speed_ups": speed}
    return ways

"""Runs of `benchmarks.shaping` -> numbers. Invariant: pure; a ratio is within one repeat, then comes the median."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from benchmarks.common import median_of_known, percentile
from benchmarks.shaping.records import GroupRecord, Run
from benchmarks.shaping.setup import BASELINE, WAY_NAMES, WayName
from benchmarks.shaping.simulation import Simulated, speed_ups

Runs = Mapping[tuple[WayName, int], Run]
Row = dict[str, Any]

LENGTH_FIELDS = ("mean", "std", "p50", "p99", "max")


def lengths_row(lengths: Sequence[int]) -> Row:
    """Lengths of returned trajectories, all groups together, in tokens."""
    return {
        "mean": fmean(lengths),
        "std": pstdev(lengths),
        "p50": percentile(lengths, 50),
        "p99": percentile(lengths, 99),
        "max": max(lengths),
    }


def row_of(run: Run, pool: Run) -> Row:
    """Measurements of one way in one repeat, compared with the repeat's pool."""
    groups, returned = run.groups, run.returned
    num_candidates = sum(group.num_candidates for group in groups)
    return {
        "way": run.way,
        "repeat": run.repeat,
        "started_s": run.started_s,
        "server": run.server,
        "load": run.load,
        "wall_s": run.wall_s,
        "generated_tokens": run.generated_tokens,
        "returned_tokens": sum(returned),
        "wasted_tokens": run.generated_tokens - sum(returned),
        "lengths": lengths_row(returned),
        "truncated_share": _truncated_share(groups),
        "candidates_per_prompt": num_candidates / len(groups),
        "upper_bound_share": sum(group.at_upper_bound for group in groups) / len(groups),
        "num_incomplete": sum(not group.complete for group in groups),
        "num_preemptions": run.num_preemptions,
        "same_lengths_share": same_lengths_share(run, pool),
        "warnings": list(run.warnings),
    }


def same_lengths_share(run: Run, pool: Run) -> float | None:
    """Share of the candidates that were not stopped whose length is that in the pool. None if all were stopped.

    Seeds are the same, but a batch of another size rounds logits differently, and then answers diverge.
    """
    theirs = {group.prompt_id: group for group in pool.groups}
    pairs = [
        (length, theirs[group.prompt_id].lengths[index])
        for group in run.groups
        for index, (length, end) in enumerate(zip(group.lengths, group.ends, strict=True))
        if end in ("stop", "length")
    ]
    return fmean(length == other for length, other in pairs) if pairs else None


def summarize_ways(rows: Sequence[Row]) -> dict[str, Row]:
    """Medians over repeats, of values and of ratios within a repeat."""
    cells = {(row["way"], row["repeat"]): row for row in rows}
    repeats = sorted({repeat for _, repeat in cells})
    ways = {}
    for name in WAY_NAMES:
        mine = [cells[name, repeat] for repeat in repeats]
        base = [cells[BASELINE, repeat] for repeat in repeats]
        plain = ("wall_s", "generated_tokens", "returned_tokens", "wasted_tokens", "truncated_share")
        plain += ("candidates_per_prompt", "upper_bound_share", "same_lengths_share")
        speed = [b["wall_s"] / m["wall_s"] for m, b in zip(mine, base, strict=True)]
        ways[name] = {
            **{field: median_of_known(row[field] for row in mine) for field in plain},
            "num_incomplete": sum(row["num_incomplete"] for row in mine),
            "num_preemptions": sum(row["num_preemptions"] for row in mine),
            "lengths": {field: median_of_known(row["lengths"][field] for row in mine) for field in LENGTH_FIELDS},
            "speed_up": median_of_known(speed),
            "speed_ups": speed,
            "generated_ratio": median_of_known(
                m["generated_tokens"] / b["generated_tokens"] for m, b in zip(mine, base, strict=True)
            ),
            "length_ratios": _length_ratios([row["lengths"] for row in mine], [row["lengths"] for row in base]),
        }
    return ways


def compare_with_simulation(
    runs: Runs, simulated: Mapping[int, Mapping[WayName, Simulated]]
) -> tuple[list[Row], dict[str, Row]]:
    """Speed-ups over the baseline, simulated and measured: by way and repeat, and by way."""
    rows = []
    for repeat, ways in simulated.items():
        measured = speed_ups({name: runs[name, repeat].wall_s for name in WAY_NAMES})
        predicted = speed_ups({name: way.seconds for name, way in ways.items()})
        for name, way in ways.items():
            rows.append(
                {
                    "way": name,
                    "repeat": repeat,
                    "measured_s": runs[name, repeat].wall_s,
                    "simulated_s": way.seconds,
                    "measured_speed_up": measured[name],
                    "simulated_speed_up": predicted[name],
                    "error": predicted[name] / measured[name] - 1,
                    "generated_tokens": runs[name, repeat].generated_tokens,
                    "simulated_tokens": way.generated_tokens,
                    "same_allocation": way.shares == [group.num_candidates for group in runs[name, repeat].groups],
                }
            )
    ways = {}
    for name in WAY_NAMES:
        mine = [row for row in rows if row["way"] == name]
        ways[name] = {
            "simulated_speed_up": median_of_known(row["simulated_speed_up"] for row in mine),
            "measured_speed_up": median_of_known(row["measured_speed_up"] for row in mine),
            "median_absolute_error": median_of_known(abs(row["error"]) for row in mine),
            "largest_absolute_error": max(abs(row["error"]) for row in mine),
            "simulated_over_measured_s": median_of_known(row["simulated_s"] / row["measured_s"] for row in mine),
            "same_allocation": all(row["same_allocation"] for row in mine),
        }
    return rows, ways


def _truncated_share(groups: Sequence[GroupRecord]) -> float:
    ends = [group.ends[index] for group in groups for index in group.selected]
    return fmean(end == "length" for end in ends)


def _length_ratios(rows: Sequence[Row], base: Sequence[Row]) -> Row:
    pairs = list(zip(rows, base, strict=True))
    return {
        field: median_of_known(row[field] / other[field] for row, other in pairs if other[field])
        for field in LENGTH_FIELDS
    }

"""The picture of `benchmarks.two_ranks`. Invariant: drawn from the JSON alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.tables import picture

COLORS = {
    "off": "#94a3b8",
    "recompute": "#f59e0b",
    "kv": "#0d9488",
    "drained-recompute": "#b45309",
    "drained-kv": "#115e59",
}


def draw(result: dict[str, Any], path: Path) -> None:
    with picture(path, figsize=(12, 4), width_ratios=(1, 1, 1.1), w_pad=2.5) as (times, freed, prices):
        _bars(times, result, "seconds", "seconds of a step")
        _bars(freed, result, "freed_rank_s", "freed rank-seconds")
        freed.set_yticklabels([])
        _prices(prices, result)


def _bars(axes: Any, result: dict[str, Any], name: str, label: str) -> None:
    """Medians, and each step as a dot."""
    ways = list(result["ways"])
    for position, way in enumerate(ways):
        axes.barh(position, result["ways"][way][name], color=COLORS[way], height=0.62)
        steps = [row[name] for row in result["steps"] if row["way"] == way]
        axes.plot(steps, [position] * len(steps), "o", color="white", markeredgecolor="#1e293b", markersize=4)
    axes.set_yticks(range(len(ways)), ways)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{label}: median, dots are steps")


def _prices(axes: Any, result: dict[str, Any]) -> None:
    most = 0.0
    for way in result["ways"]:
        found = [each for row in result["steps"] if row["way"] == way for each in row["consolidations"]]
        measured = [each for each in found if each["sibling_lost_s"] is not None]
        xs, ys = [each["predicted_s"] for each in measured], [each["sibling_lost_s"] for each in measured]
        if measured:
            axes.plot(xs, ys, "o", color=COLORS[way], label=way)
            most = max(most, *xs, *ys)
    axes.plot([0, most], [0, most], color="#94a3b8", lw=1, ls="--")
    axes.set_xlabel("predicted price of a consolidation, s")
    axes.set_ylabel("what the median candidate lost, s")
    if most:
        axes.legend(frameon=False)

"""Results of `benchmarks.shaping` -> tables in Markdown and one picture.

Invariant: shows only values of the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.long_run import speed_up
from benchmarks.shaping.setup import BASELINE, WAYS, WayName
from benchmarks.tables import INK, bars, columns, number, percent, picture

COLORS: dict[WayName, str] = {
    "uniform": "#64748b",
    "early_stop": "#94a3b8",
    "dual_end": "#f59e0b",
    "dual_end_patience": "#fbbf24",
    "pool": "#b45309",
    "auto": "#0f766e",
    "auto_dual_end": "#7c3aed",
    "auto_patience": "#5eead4",
}
TITLES = {name: way.title for name, way in WAYS.items()}


def tables(result: Mapping[str, Any]) -> str:
    return f"{_ways(result)}\n\n{result['note']}"


def _ways(result: Mapping[str, Any]) -> str:
    sizes, simulation = result["sizes"], result["simulation"]
    title = (
        f"{sizes['prompts']} prompts, M = {sizes['group_size']}, {Path(sizes['model']).name}, at most "
        f"{sizes['max_tokens']} tokens, {len(result['repeats'])} repeats; simulated from the pool's lengths, "
        f"{simulation['machine']}"
    )
    if result["num_servers"] > 1:
        title += f"; interrupted: {result['num_servers']} servers one after the other"
    cells = {
        "way": lambda row: TITLES[row["way"]],
        "seconds": lambda row: number(row["wall_s"], 1),
        "× uniform": speed_up,
        "simulated": lambda row: number(row["simulated_speed_up"], 2),
        "error, median": lambda row: percent(row["median_absolute_error"], 1),
        "largest": lambda row: percent(row["largest_absolute_error"], 1),
        "same allocation": lambda row: "yes" if row["same_allocation"] else "**no**",
        "generated": lambda row: f"{row['generated_tokens']:,.0f}",
        "candidates per prompt": lambda row: number(row["candidates_per_prompt"], 1),
        "at the upper bound": lambda row: percent(row["upper_bound_share"]),
        "incomplete groups": lambda row: str(row["num_incomplete"]),
    }
    rows = [{**row, **simulation["ways"][name], "way": name} for name, row in result["ways"].items()]
    return columns(title, rows, cells | LENGTH_CELLS)


LENGTH_CELLS = {
    f"{name}, tokens": lambda row, field=field: _length(row["lengths"][field], row["length_ratios"][field])
    for name, field in (("mean", "mean"), ("std", "std"), ("P50", "p50"), ("P99", "p99"))
}
"""Columns for lengths of returned trajectories, with the ratio to `uniform`."""


def _length(value: float, ratio: float | None) -> str:
    return number(value, 0) + (f" ({ratio:.2f})" if ratio else "")


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Left: wall time. Middle: returned lengths of the same ways. Right: simulated against measured speed-up."""
    with picture(path, figsize=(17, 5), width_ratios=(1.15, 1, 1), w_pad=2) as (left, middle, right):
        _draw_times(left, result)
        _draw_lengths(middle, result)
        _draw_simulation(right, result)


def _draw_times(axes: Any, result: Mapping[str, Any]) -> None:
    ways, sizes = result["ways"], result["sizes"]
    bars(
        axes,
        {name: row["wall_s"] for name, row in ways.items()},
        colors=COLORS,
        names=TITLES,
        texts={name: f"{row['wall_s']:.1f} s, {row['speed_up']:.2f}×" for name, row in ways.items()},
        runs={name: [row["wall_s"] for row in result["measurements"] if row["way"] == name] for name in ways},
        title=f"{sizes['prompts']} prompts, M = {sizes['group_size']}, at most {sizes['max_tokens']} tokens",
        xlabel="seconds (ticks: single runs), × against the first",
    )
    axes.axvline(ways[BASELINE]["wall_s"], color=INK, lw=1, ls=":", zorder=0)


def _draw_lengths(axes: Any, result: Mapping[str, Any]) -> None:
    lengths = result["returned_lengths"]
    drawn = axes.boxplot(
        list(lengths.values()),
        positions=range(len(lengths)),
        orientation="horizontal",
        widths=0.6,
        whis=(1, 99),
        showfliers=False,
        showmeans=True,
        patch_artist=True,
        medianprops={"color": INK},
        meanprops={"marker": "D", "markerfacecolor": "white", "markeredgecolor": INK, "markersize": 5},
    )
    for box, name in zip(drawn["boxes"], lengths, strict=True):
        box.set(facecolor=COLORS[name], edgecolor=INK)
    axes.set_yticks([])
    axes.set_ylim(len(lengths) - 0.45, -0.55)
    axes.set_xlabel("tokens (quartiles, 1 to 99 %, diamond: mean)")
    axes.set_title("Answers that come back", loc="left", weight="bold")


def _draw_simulation(axes: Any, result: Mapping[str, Any]) -> None:
    rows = [row for row in result["simulation"]["rows"] if row["way"] != BASELINE]
    values = [row[field] for row in rows for field in ("measured_speed_up", "simulated_speed_up")]
    low, high = 0.9 * min(values), 1.08 * max(values)
    ends = (low, high)
    axes.fill_between(ends, [0.9 * x for x in ends], [1.1 * x for x in ends], color=INK, alpha=0.08, lw=0)
    axes.plot(ends, ends, color=INK, lw=0.8, alpha=0.5)
    for name in dict.fromkeys(row["way"] for row in rows):
        mine = [row for row in rows if row["way"] == name]
        xs, ys = ([row[field] for row in mine] for field in ("measured_speed_up", "simulated_speed_up"))
        axes.plot(xs, ys, "o", color=COLORS[name], ms=8, mec="white", mew=0.8)
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_xlabel("measured speed-up (band: within 10 %)")
    axes.set_ylabel("simulated speed-up")
    axes.set_title("The simulator: a dot per way and repeat", loc="left", weight="bold")

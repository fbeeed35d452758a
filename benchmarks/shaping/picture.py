"""Results of `benchmarks.shaping` -> tables in Markdown and one picture.

Invariant: shows what is there and adds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.shaping.setup import BASELINE, WAYS, WayName
from benchmarks.tables import INK, grid, number, percent, picture

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
LIGHT = ("early_stop", "dual_end", "dual_end_patience", "auto_patience")
"""Ways with colours on which white is hard to read."""
LENGTH_HEADER = ("mean", "std", "P50", "P99", "max")


def tables(result: Mapping[str, Any]) -> str:
    return "\n\n".join(
        [_speed(result), _lengths(result), _again(result), _simulated(result), _targets(result), result["note"]]
    )


def _speed(result: Mapping[str, Any]) -> str:
    sizes = result["sizes"]
    rows = []
    for name, row in result["ways"].items():
        tokens = [f"{row[field]:,.0f}" for field in ("generated_tokens", "returned_tokens", "wasted_tokens")]
        low, high = min(row["speed_ups"]), max(row["speed_ups"])
        rows.append(
            [
                f"{name}: {WAYS[name].title}",
                number(row["wall_s"], 1),
                f"{row['speed_up']:.2f} ({low:.2f} to {high:.2f})",
                *tokens,
                number(row["candidates_per_prompt"], 1),
                percent(row["upper_bound_share"]),
                str(row["num_incomplete"]),
            ]
        )
    header = ["way", "seconds", "× uniform", "generated", "returned", "wasted", "candidates per prompt"]
    title = (
        f"{sizes['prompts']} prompts, M = {sizes['group_size']}, {Path(sizes['model']).name}, at most "
        f"{sizes['max_tokens']} tokens, {len(result['repeats'])} repeats"
    )
    if result["num_servers"] > 1:
        title += f", interrupted: {result['num_servers']} servers one after the other"
    return grid(title, [*header, "at the upper bound", "incomplete groups"], rows)


def _lengths(result: Mapping[str, Any]) -> str:
    rows = [[name, *_length_cells(row), percent(row["truncated_share"])] for name, row in result["ways"].items()]
    return grid("Returned lengths, tokens (× uniform)", ["way", *LENGTH_HEADER, "truncated"], rows)


def _again(result: Mapping[str, Any]) -> str:
    rows = [
        [
            f"{row['candidates_over_group_size']:g}x",
            f"{row['num_longest']}:{row['num_shortest']}",
            *_length_cells(row),
            percent(row["truncated_share"]),
        ]
        for row in result["selected_again"]
    ]
    title = "Longest:shortest, selected again from the recorded pools (time does not depend on it), tokens (× uniform)"
    return grid(title, ["candidates", "L:K", *LENGTH_HEADER, "truncated"], rows)


def _length_cells(row: Mapping[str, Any]) -> list[str]:
    return [
        f"{number(value, 0)} ({row['length_ratios'][field]:.2f})" if row["length_ratios"][field] else number(value, 0)
        for field, value in row["lengths"].items()
    ]


def _simulated(result: Mapping[str, Any]) -> str:
    rows = [
        [
            name,
            number(row["simulated_speed_up"], 2),
            number(row["measured_speed_up"], 2),
            percent(row["median_absolute_error"], 1),
            percent(row["largest_absolute_error"], 1),
            number(row["simulated_over_measured_s"], 2),
            percent(result["ways"][name]["same_lengths_share"]),
            "yes" if row["same_allocation"] else "**no**",
        ]
        for name, row in result["simulation"]["ways"].items()
    ]
    header = ["way", "× uniform, simulated", "measured", "error, median", "largest", "simulated / measured time"]
    title = f"Simulated from the pool's lengths, {result['simulation']['machine']}"
    return grid(title, [*header, "lengths as in the pool", "same allocation"], rows)


def _targets(result: Mapping[str, Any]) -> str:
    if not result["targets"]:
        return "No targets: without a profile a simulated step takes one unit of time, whatever is in it."
    rows = [
        [t["name"], percent(t["value"], 1), percent(t["target"]), "reached" if t["reached"] else "**missed**"]
        for t in result["targets"]
    ]
    return grid("Targets", ["target", "value", "at most", ""], rows)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Left: wall time. Middle: returned lengths of the same ways. Right: simulated against measured speed-up."""
    with picture(path, figsize=(17, 5), width_ratios=(1.15, 1, 1), w_pad=2) as (left, middle, right):
        _draw_times(left, result)
        _draw_lengths(middle, result)
        _draw_simulation(right, result)


def _draw_times(axes: Any, result: Mapping[str, Any]) -> None:
    ways = result["ways"]
    slowest = max(row["wall_s"] for row in ways.values())
    for position, (name, row) in enumerate(ways.items()):
        axes.barh(position, row["wall_s"], color=COLORS[name], height=0.66)
        runs = [row["wall_s"] for row in result["measurements"] if row["way"] == name]
        axes.plot(runs, [position + 0.27] * len(runs), "|", color=INK, ms=5, mew=1.2)
        inside = row["wall_s"] > 0.45 * slowest
        axes.annotate(
            f"{row['wall_s']:.1f} s, {row['speed_up']:.2f}×",
            (0 if inside else max(*runs, row["wall_s"]), position),
            (8, 0),
            textcoords="offset points",
            va="center",
            color="white" if inside and name not in LIGHT else INK,
            weight="bold",
        )
    axes.axvline(ways[BASELINE]["wall_s"], color=INK, lw=1, ls=":", zorder=0)
    _name_ways(axes, result)
    axes.set_xlabel("seconds (ticks: single runs), × against the first")
    sizes = result["sizes"]
    axes.set_title(
        f"{sizes['prompts']} prompts, M = {sizes['group_size']} answers each, at most {sizes['max_tokens']} tokens",
        loc="left",
        weight="bold",
    )


def _draw_lengths(axes: Any, result: Mapping[str, Any]) -> None:
    lengths = result["returned_lengths"]
    boxes = axes.boxplot(
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
        whiskerprops={"color": INK},
        capprops={"color": INK},
    )
    for box, name in zip(boxes["boxes"], lengths, strict=True):
        box.set(facecolor=COLORS[name], edgecolor=INK)
    _name_ways(axes, result)
    axes.set_yticklabels([])
    axes.set_xlabel("tokens (quartiles, 1 to 99 %, diamond: mean)")
    axes.set_title("Answers that come back", loc="left", weight="bold")


def _name_ways(axes: Any, result: Mapping[str, Any]) -> None:
    axes.set_yticks(range(len(result["ways"])), [WAYS[name].title for name in result["ways"]])
    axes.set_ylim(len(result["ways"]) - 0.4, -0.6)


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


def described_machine(profiled_model: str | None, max_num_seqs: int) -> str:
    where = "a step takes one unit of time" if profiled_model is None else f"profile of {profiled_model}"
    return f"{where}, {max_num_seqs} candidates at once"

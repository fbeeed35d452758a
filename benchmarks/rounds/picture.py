"""Results of `benchmarks.rounds` -> a table in Markdown and one picture. Invariant: shows only values of the result."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from benchmarks.long_run import speed_up
from benchmarks.rounds.setup import BASELINE, TITLES, WayName
from benchmarks.tables import bars, columns, number, percent, picture

COLORS: dict[WayName, str] = {"plain": "#94a3b8", "client": "#f59e0b", "run": "#0f766e"}
NAMES = {name: title.replace(", ", ",\n").replace(" by ", "\nby ") for name, title in TITLES.items()}


def tables(result: Mapping[str, Any]) -> str:
    return f"{_ways(result)}\n\n{result['note']}"


def _ways(result: Mapping[str, Any]) -> str:
    sizes = result["sizes"]
    title = (
        f"A period of rounds of {sizes['prompts_per_round']} prompts x {sizes['group_size']}, "
        f"{Path(sizes['model']).name}, at most {sizes['max_tokens']} tokens, {sizes['repeats']} repeats"
    )
    return columns(
        title,
        [{**row, "way": name} for name, row in result["ways"].items()],
        {
            "way": lambda row: TITLES[row["way"]],
            "seconds": lambda row: number(row["wall_s"], 1),
            "× faster than plain": lambda row: "1" if row["way"] == BASELINE else speed_up(row),
            "mean round": lambda row: number(row["mean_round_s"], 1),
            "short": lambda row: number(row.get("short_rounds_s"), 1),
            "long": lambda row: number(row.get("long_rounds_s"), 1),
            "max length": lambda row: number(row["mean_max_tokens"], 0),
            "P75": lambda row: number(row["mean_p75_tokens"], 0),
            "generated": lambda row: f"{row['generated_tokens']:,.0f}",
            "wasted": lambda row: f"{row['wasted_tokens']:,.0f}",
            "share": lambda row: percent(row["wasted_tokens"] / row["generated_tokens"]),
        },
    )


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Left: seconds of a period. Middle: rounds of the first repeat. Right: tokens, returned and wasted."""
    with picture(path, figsize=(16, 4.6), width_ratios=(1, 1.25, 0.9), w_pad=2) as (left, middle, right):
        _draw_seconds(left, result)
        _draw_rounds(middle, result)
        _draw_tokens(right, result)


def _draw_seconds(axes: Any, result: Mapping[str, Any]) -> None:
    ways = result["ways"]
    bars(
        axes,
        {name: row["wall_s"] for name, row in ways.items()},
        colors=COLORS,
        names=NAMES,
        texts={n: f"{row['wall_s']:.1f} s" + f", {row['speed_up']:.2f}×" * (n != BASELINE) for n, row in ways.items()},
        runs={name: [each["wall_s"] for each in result["measurements"] if each["way"] == name] for name in ways},
        title="One period, the same prompts",
        xlabel="seconds of rollout (ticks: single repeats)",
    )


def _draw_rounds(axes: Any, result: Mapping[str, Any]) -> None:
    width = 0.8 / len(result["ways"])
    first = [measured for measured in result["measurements"] if measured["repeat"] == 0]
    for measured in first:
        offset = (list(result["ways"]).index(measured["way"]) - (len(result["ways"]) - 1) / 2) * width
        rounds = measured["rounds"]
        xs = [i + 1 + offset for i in range(len(rounds))]
        hatches = ["//" if each["name"] == "long" else "" for each in rounds]
        drawn = axes.bar(xs, [each["wall_s"] for each in rounds], width=0.92 * width, color=COLORS[measured["way"]])
        for bar, hatch in zip(drawn, hatches, strict=True):
            bar.set(hatch=hatch, edgecolor="white", lw=0)
    axes.set_xticks(range(1, 1 + max(len(measured["rounds"]) for measured in first)))
    axes.set_xlabel("round of the first repeat (hatched: the long one)")
    axes.set_ylabel("seconds")
    axes.set_title("Rounds", loc="left", weight="bold")


def _draw_tokens(axes: Any, result: Mapping[str, Any]) -> None:
    for position, row in enumerate(result["ways"].values()):
        axes.barh(
            position, row["wasted_tokens"], left=row["returned_tokens"], height=0.62, facecolor="#e2e8f0",
            edgecolor="#94a3b8", hatch="////", lw=0,
        )  # fmt: skip
    bars(
        axes,
        {name: row["returned_tokens"] for name, row in result["ways"].items()},
        colors=COLORS,
        names=dict.fromkeys(COLORS, ""),
        title="What the engine generated",
        xlabel="tokens of a period (hatched: wasted)",
    )
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter("{x:,.0f}")

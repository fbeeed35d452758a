"""Results of `benchmarks.rounds` -> a table in Markdown and one picture. Invariant: shows what is there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from benchmarks.rounds.setup import BASELINE, TITLES, WayName
from benchmarks.tables import INK, grid, number, percent, picture

COLORS: dict[WayName, str] = {"plain": "#94a3b8", "client": "#f59e0b", "run": "#0f766e"}


def tables(result: Mapping[str, Any]) -> str:
    return "\n\n".join([_ways(result), _rounds(result), result["note"]])


def _ways(result: Mapping[str, Any]) -> str:
    sizes = result["sizes"]
    rows = []
    for name, row in result["ways"].items():
        low, high = min(row["speed_ups"]), max(row["speed_ups"])
        speed = "1" if name == BASELINE else f"{row['speed_up']:.2f} ({low:.2f} to {high:.2f})"
        tokens = [f"{row[field]:,.0f}" for field in ("generated_tokens", "wasted_tokens")]
        cells = [TITLES[name], number(row["wall_s"], 1), speed, number(row["mean_round_s"], 1)]
        cells += [number(row.get("short_rounds_s"), 1), number(row.get("long_rounds_s"), 1)]
        cells += [number(row["mean_max_tokens"], 0), number(row["mean_p75_tokens"], 0), *tokens]
        rows.append([*cells, percent(row["wasted_tokens"] / row["generated_tokens"])])
    header = ["way", "seconds", "× faster than plain", "mean round", "short", "long", "max length", "P75", "generated"]
    title = (
        f"A period of rounds of {sizes['prompts_per_round']} prompts x {sizes['group_size']}, "
        f"{Path(sizes['model']).name}, at most {sizes['max_tokens']} tokens, {sizes['repeats']} repeats"
    )
    return grid(title, [*header, "wasted", "share"], rows)


def _rounds(result: Mapping[str, Any]) -> str:
    """Of the first repeat."""
    rows = [
        [
            measured["way"],
            str(number_of + 1),
            each["name"],
            number(each["wall_s"], 1),
            number(each["max_tokens"]),
            number(each["p75_tokens"], 0),
            number(each["generated_tokens"]),
            number(each["wasted_tokens"]),
        ]
        for measured in result["measurements"]
        if measured["repeat"] == 0
        for number_of, each in enumerate(measured["rounds"])
    ]
    header = ["way", "round", "kind", "seconds", "max length", "P75", "generated", "wasted"]
    return grid("Rounds of the first repeat", header, rows)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Left: seconds of a period. Middle: rounds of the first repeat. Right: tokens, returned and wasted."""
    with picture(path, figsize=(16, 4.6), width_ratios=(1, 1.25, 0.9), w_pad=2) as (left, middle, right):
        _draw_seconds(left, result)
        _draw_rounds(middle, result)
        _draw_tokens(right, result)


def _draw_seconds(axes: Any, result: Mapping[str, Any]) -> None:
    for position, (name, row) in enumerate(result["ways"].items()):
        axes.barh(position, row["wall_s"], color=COLORS[name], height=0.62)
        singles = [each["wall_s"] for each in result["measurements"] if each["way"] == name]
        axes.plot(singles, [position + 0.25] * len(singles), "|", color=INK, ms=6, mew=1.3)
        text = f"{row['wall_s']:.1f} s" + ("" if name == BASELINE else f", {row['speed_up']:.2f}×")
        axes.annotate(
            text, (0, position), (8, 0), textcoords="offset points", va="center", color="white", weight="bold"
        )
    _name_ways(axes, result)
    axes.set_xlabel("seconds of rollout (ticks: single repeats)")
    axes.set_title("One period, the same prompts", loc="left", weight="bold")


def _draw_rounds(axes: Any, result: Mapping[str, Any]) -> None:
    width = 0.8 / len(result["ways"])
    first = [measured for measured in result["measurements"] if measured["repeat"] == 0]
    for measured in first:
        offset = (list(result["ways"]).index(measured["way"]) - (len(result["ways"]) - 1) / 2) * width
        rounds = measured["rounds"]
        xs = [i + 1 + offset for i in range(len(rounds))]
        hatches = ["//" if each["name"] == "long" else "" for each in rounds]
        bars = axes.bar(xs, [each["wall_s"] for each in rounds], width=0.92 * width, color=COLORS[measured["way"]])
        for bar, hatch in zip(bars, hatches, strict=True):
            bar.set(hatch=hatch, edgecolor="white", lw=0)
    axes.set_xticks(range(1, 1 + max(len(measured["rounds"]) for measured in first)))
    axes.set_xlabel("round of the first repeat (hatched: the long one)")
    axes.set_ylabel("seconds")
    axes.set_title("Rounds", loc="left", weight="bold")


def _draw_tokens(axes: Any, result: Mapping[str, Any]) -> None:
    for position, (name, row) in enumerate(result["ways"].items()):
        axes.barh(position, row["returned_tokens"], color=COLORS[name], height=0.62)
        axes.barh(
            position, row["wasted_tokens"], left=row["returned_tokens"], height=0.62, facecolor="#e2e8f0",
            edgecolor="#94a3b8", hatch="////", lw=0,
        )  # fmt: skip
    _name_ways(axes, result)
    axes.set_yticklabels([])
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens of a period (hatched: wasted)")
    axes.set_title("What the engine generated", loc="left", weight="bold")


def _name_ways(axes: Any, result: Mapping[str, Any]) -> None:
    names = [TITLES[name].replace(", ", ",\n").replace(" by ", "\nby ") for name in result["ways"]]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)

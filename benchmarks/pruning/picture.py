"""Results of `benchmarks.pruning` -> tables in Markdown and one picture.

Invariant: shows only values of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.tables import INK, bars, columns, number, picture, ranged

WAY_NAMES = {
    "none": "nobody pruned",
    "random": "at random",
    "paper": "paper's rule",
    "balance": "balance rule",
    "gradient": "gradient rule",
    "fewer": "fewer, nobody pruned",
}
COLORS = {"head": "#0f766e", "confidence": "#94a3b8", "none": "#64748b", "random": "#94a3b8", "paper": "#f59e0b"}
COLORS |= {"balance": "#134e4a", "gradient": COLORS["head"]}


def tables(result: Mapping[str, Any]) -> str:
    """Tables of survivors and speed by phase, in Markdown."""
    phases = result["phases"]
    return "\n\n".join(table(phases[name]) for name, table in TABLES.items() if name in phases)


def _survivors(title: str, phase: Mapping[str, Any]) -> str:
    speed = phase["speed"]
    cells = {
        "way": lambda row: WAY_NAMES[row["way"]],
        "survivors": lambda row: number(row["num_survivors"]),
        "E[ρ̂]": lambda row: number(row["mean_ratio"]),
        "E[ρ̂(1−ρ̂)]": lambda row: number(row["mean_ratio_product"]),
        "without variance": lambda row: number(row["share_without_variance"]),
        "of all": lambda row: number(row["overall_ratio"]),
        "from 0.5": lambda row: number(row["distance_from_half"]),
        "tokens": lambda row: number(speed[row["way"]]["generated_tokens"]),
        "s per block": lambda row: number(speed[row["way"]]["median_wall_s"], 1),
        "× none": lambda row: number(speed[row["way"]]["speed_ratio"], 2),
    }
    return columns(title, [{**row, "way": way} for way, row in phase["survivors"].items()], cells)


def _fewer(phase: Mapping[str, Any]) -> str:
    num_groups = phase["survivors"]["none"]["num_groups"]
    return _survivors(f"Half as many candidates, none pruned: {num_groups} prompts", phase)


def _compare(phase: Mapping[str, Any]) -> str:
    num_groups, num_blocks = phase["survivors"]["none"]["num_groups"], phase["speed"]["none"]["num_blocks"]
    said = [
        f"At random, in expectation: E[ρ̂(1−ρ̂)] {number(phase['random_in_expectation'])}.",
        _differences(phase["balance_minus"], "mean_ratio_product", "E[ρ̂(1−ρ̂)] of the balance rule, minus"),
        _differences(phase["gradient_minus"], "mean_ratio_product", "E[ρ̂(1−ρ̂)] of the gradient rule, minus"),
        _differences(phase["gradient_minus"], "share_without_variance", "Groups without variance by it, minus"),
        f"Audit groups, in which nobody is stopped: {phase['num_audits']['none']} of {num_groups} in every way.",
    ]
    return "\n\n".join([_survivors(f"Half kept: {num_groups} prompts in {num_blocks} blocks", phase), *said])


def _differences(minus: Mapping[str, Any], measure: str, what: str) -> str:
    return f"{what} {'; '.join(f'{WAY_NAMES[other]}: {ranged(row[measure])}' for other, row in minus.items())}."


def _sweep(phase: Mapping[str, Any]) -> str:
    title = (
        f"keep_ratio: scored after {phase['detection_length']} tokens, mean length "
        f"{number(phase['mean_length_over_detection_length'], 1)} times that"
    )
    return columns(
        title,
        [{**row, "keep_ratio": ratio} for ratio, row in phase["speed"].items()],
        {
            "keep_ratio": lambda row: row["keep_ratio"],
            "pruned": lambda row: f"{row['num_pruned']:,} of {row['num_scored']:,}",
            "tokens": lambda row: f"{row['generated_tokens']:,}",
            "× fewer": lambda row: number(row["tokens_ratio"], 2),
            "s per block": lambda row: f"{row['median_wall_s']:.1f}",
            "× faster": lambda row: number(row["speed_ratio"], 2),
        },
    )


TABLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {"compare": _compare, "sweep": _sweep, "fewer": _fewer}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Left: learning curve. Middle: survivors by rule. Right: speed by keep_ratio. Missing phases are blank."""
    phases = result["phases"]
    with picture(path, figsize=(15.5, 4.6), width_ratios=(1.35, 1.2, 1), w_pad=3) as panels:
        for axes, (name, panel) in zip(panels, PANELS.items(), strict=True):
            if name in phases:
                panel(axes, phases)


def _draw_learning(axes: Any, phases: Mapping[str, Any]) -> None:
    curve = phases["learn"]["learning_curve"]
    end = phases["learn"]["num_labels"]
    for color, score in (("head", "head"), ("confidence", "bottom_windows")):
        for measure, style, told in (("auc", "-", ""), ("within_group_auc", "--", ", within groups")):
            known = [part for part in curve if part[measure][score] is not None]
            middles = [part["num_labels_before"] + part["num_labels"] / 2 for part in known]
            values = [part[measure][score] for part in known]
            axes.plot(middles, values, style, color=COLORS[color], lw=2, ms=4, marker=".", label=color + told)
            if "evaluate" in phases:
                row = phases["evaluate"]["discrimination"][measure][score]
                if row["value"] is None:
                    continue
                place = end * ((1.05 if measure == "auc" else 1.13) + (0.02 if color == "head" else 0))
                axes.plot([place, place], row["interval"] or [row["value"]] * 2, color=COLORS[color], lw=1.5)
                axes.plot(place, row["value"], "o" if measure == "auc" else "s", color=COLORS[color], ms=6)
    axes.axhline(0.5, color=INK, lw=0.8, alpha=0.4)
    axes.set_xlim(0, 1.2 * max(1, end))
    axes.set_xlabel("labels (at the right: held-out prompts, 90 % intervals)")
    axes.set_ylabel("AUC")
    axes.set_title("Rewards teach the head", loc="left", weight="bold")
    axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=2)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.22 * (high - low))


def _draw_survivors(axes: Any, phases: Mapping[str, Any]) -> None:
    rows = phases["compare"]["survivors"]
    bars(
        axes,
        {way: row["overall_ratio"] for way, row in rows.items()},
        colors=COLORS,
        names=WAY_NAMES,
        texts={way: f"{row['overall_ratio']:.2f}, {row['mean_ratio_product']:.3f}" for way, row in rows.items()},
        title="Whom each rule keeps, half of 16",
        xlabel="positive ratio of survivors (dotted: wanted), E[ρ̂(1−ρ̂)]",
    )
    axes.axvline(0.5, color=INK, lw=1.2, ls=":")
    axes.set_xlim(0, max(0.6, *(row["overall_ratio"] + 0.05 for row in rows.values())))


def _draw_speed(axes: Any, phases: Mapping[str, Any]) -> None:
    rows = phases["sweep"]["speed"]
    names = sorted(rows, key=float)
    heights = [rows[name]["speed_ratio"] for name in names]
    drawn = axes.bar(range(len(names)), heights, 0.62, color=COLORS["head"], label="seconds")
    axes.bar_label(drawn, [f"{height:.2f}" for height in heights], label_type="center", color="white", weight="bold")
    tokens = [rows[name]["tokens_ratio"] for name in names]
    axes.plot(range(len(names)), tokens, "_", color=INK, ms=30, mew=2, label="tokens")
    axes.axhline(1, color=INK, lw=0.8, alpha=0.4)
    axes.set_xticks(range(len(names)), [f"{float(name):g}" for name in names])
    axes.set_ylim(0, 1.12 * max(*heights, *tokens))
    axes.set_xlabel("keep_ratio")
    axes.set_ylabel("times less than without pruning")
    ratio = phases["sweep"]["mean_length_over_detection_length"]
    axes.set_title(f"Scored at 1/{ratio:.1f} of the length", loc="left", weight="bold")
    axes.legend(frameon=False, fontsize=9, loc="upper right")


PANELS: Mapping[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "learn": _draw_learning,
    "compare": _draw_survivors,
    "sweep": _draw_speed,
}

"""Results of `benchmarks.rounds_simulated` -> one picture: consecutive rounds, factors, and what a round is like."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.rounds_simulated.setup import FACTORS
from benchmarks.rounds_simulated.tables import row_of
from benchmarks.tables import picture

GREY, SHORT, LONG, PALE = "#94a3b8", "#0f766e", "#f59e0b", "#7dd3c8"


def draw(result: Mapping[str, Any], path: Path) -> None:
    with picture(path, (17, 5), (1.25, 1.2, 1), 2.5) as (longest, factors, means):
        _draw_longest(longest, result["rounds"])
        _draw_factors(factors, result["sweep"])
        _draw_means(means, result["rounds"])


def _draw_longest(axes: Any, rounds: Mapping[str, Any]) -> None:
    for shift, (name, its) in zip((-0.21, 0.21), rounds.items(), strict=True):
        colors = [GREY if name == "synchronous" else LONG if kind == "long" else SHORT for kind in its["kind"]]
        axes.bar([n + shift for n in range(len(its["longest"]))], its["longest"], width=0.42, color=colors)
    for color, label in ((GREY, "synchronous"), (SHORT, "short round"), (LONG, "long round")):
        axes.bar(0, 0, color=color, label=label)
    axes.set_title("longest answer of consecutive rounds, tokens (14B/16k, both 1.25x)", size=10.5, loc="left")
    axes.legend(frameon=False, ncols=3, loc="upper right", bbox_to_anchor=(1, 1.0))
    axes.set_ylim(0, 1.15 * max(max(its["longest"]) for its in rounds.values()))
    axes.set_xlabel("round")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_factors(axes: Any, sweep: Mapping[str, Any]) -> None:
    kinds = {
        "responses": (PALE, lambda f: (1, f)),
        "prompts": (LONG, lambda f: (f, 1)),
        "both": (SHORT, lambda f: (f, f)),
    }
    place, ticks = 0.0, []
    for name, rows in sweep.items():
        start = place
        for color, factors in kinds.values():
            for factor in FACTORS:
                row = row_of(rows, *factors(factor))
                shade = 0.45 + 0.55 * FACTORS.index(factor) / (len(FACTORS) - 1)
                axes.bar(place, 1 / row["speed_up"], width=0.9, color=color, alpha=shade)
                place += 1
            place += 0.4
        ticks.append(((start + place - 1.4) / 2, name))
        place += 1.6
    for label, (color, _) in kinds.items():
        axes.bar(0, 0, color=color, label=label)
    axes.axhline(1, color=GREY, lw=1, ls=(0, (3, 3)))
    axes.set_xticks([x for x, _ in ticks], [name for _, name in ticks])
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, 1.22)
    axes.legend(frameon=False, ncols=3, loc="upper right")
    axes.set_title(f"time per prompt, × synchronous; factors {', '.join(map(str, FACTORS))}", size=10.5, loc="left")


def _draw_means(axes: Any, rounds: Mapping[str, Any]) -> None:
    for name, its in rounds.items():
        numbers = range(len(its["mean_over_run"]))
        if name == "synchronous":
            axes.plot(numbers, its["mean_over_run"], "o-", color=GREY, ms=4, label=name)
            continue
        axes.plot(numbers, its["mean_over_run"], "-", color=SHORT, lw=1, alpha=0.5)
        for kind, color in (("short", SHORT), ("long", LONG)):
            own = [n for n in numbers if its["kind"][n] == kind]
            axes.plot(own, [its["mean_over_run"][n] for n in own], "o", color=color, ms=6, label=f"{kind} round")
    axes.axhline(1, color=GREY, lw=1, ls=(0, (3, 3)))
    axes.set_ylim(0, 1.3 * max(max(its["mean_over_run"]) for its in rounds.values()))
    axes.legend(frameon=False, ncols=3, loc="upper right", fontsize=8.5, handletextpad=0.2, columnspacing=1)
    axes.set_title("mean length of a round's answers, × the run's", size=10.5, loc="left")
    axes.set_xlabel("round")
    axes.xaxis.get_major_locator().set_params(integer=True)

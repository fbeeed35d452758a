"""Groups that end when their rewards differ (`"until": "variance"`): seconds, tokens, and the effect on the gradient.

`variance_rounds.py` has rounds on virtual time: ours, filtering, and a client that resamples. `variance_weights.py`
has the exact weight of a prompt in GRPO's gradient.

Run from the repository root: python -m benchmarks.rewards.variance

Invariant: the same numbers for the same seed, and no timing of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import NullLocator

from benchmarks.common import ROOT, arguments_of, publish, record_of_run
from benchmarks.rewards.variance_rounds import (
    GRADING_MEDIAN_S,
    GRADING_SIGMA,
    GROUP_SIZE,
    MAX_CANDIDATES,
    MIXED,
    MODEL,
    PROMPT_TOKENS,
    RATES,
    SEATS,
    SLOW_GRADING_S,
    SLOW_WAYS,
    WAYS,
    rounds,
)
from benchmarks.rewards.variance_weights import weights
from benchmarks.rollpacker import MODELS, TAILS
from benchmarks.tables import INK, Row, columns, grid, lines, number, percent, picture
from vllm_rollout.group.rewards.estimates import ESTIMATORS

WEIGHT_RATES = tuple(rate for rate in RATES if rate <= 0.5)
"""Weights are the same at 1 - p, and biases of the success rate have the opposite sign."""


def all_weights() -> list[dict[str, Any]]:
    return [
        {"rate": rate, "group_size": size, "max_candidates": most, "estimator": estimator}
        | {name: round(value, 5) for name, value in weights(rate, size, most, estimator).items()}
        for estimator in ESTIMATORS
        for size in (4, 8, 16)
        for most in (size, 2 * size, 4 * size, None)
        for rate in WEIGHT_RATES
    ]


def tables(record: Row) -> str:
    shown = [("seconds", 2), ("tokens", 0), ("prompts", 2)]
    parts = [_rounds(record["rounds"], key, digits) for key, digits in shown]
    slow = f", graders that take {SLOW_GRADING_S:g} s"
    parts += [_rounds(record["slow"], key, digits, slow) for key, digits in shown]
    return "\n\n".join([*parts, _weights(record["weights"])])


def _rounds(rows: Sequence[Row], key: str, digits: int, graders: str = "") -> str:
    sizes = f"{SEATS} groups of {GROUP_SIZE}, at most {MAX_CANDIDATES} candidates{graders}"
    by_way: dict[str, dict[float | None, float]] = {}
    for row in rows:
        by_way.setdefault(row["way"], {})[row["rate"]] = row[key]
    header = ["way", *(percent(rate) for rate in RATES), "mixed"]
    cells = [
        [WAYS[name].title, *(number(value, digits) for value in values.values())] for name, values in by_way.items()
    ]
    return grid(f"{key.capitalize()} per group that teaches, {sizes}", header, cells)


def _weights(rows: Sequence[Row]) -> str:
    shown = [row for row in rows if row["estimator"] == "grpo" and row["group_size"] == GROUP_SIZE]
    title = f"Weight of a prompt over plain GRPO's, G = {GROUP_SIZE}, exact"
    return columns(title, shown, {
        "success": lambda row: percent(row["rate"]),
        "N": lambda row: str(row["max_candidates"] or "no limit"),
        "ours": lambda row: number(row["ours"], 2),
        "ours, G / n": lambda row: number(row["ours_weighed"], 2),
        "all n": lambda row: number(row["all_graded"], 2),
        "ours over filter's, of what teaches": lambda row: number(row["ours_over_filtered_if_it_teaches"], 2),
        "teaches": lambda row: percent(row["teaches"]),
        "mean n": lambda row: number(row["num_graded"], 1),
        "mean of returned - p": lambda row: number(row["bias_of_returned"], 3),
        "mean of all - p": lambda row: number(row["bias_of_all"], 3),
    })  # fmt: skip


DRAWN = ("ours", "ours_grading", "filter", "batches", "resample")


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Left and middle: seconds and tokens per group with a gradient. Right: weight of a prompt."""
    with picture(path, figsize=(16, 4.8), width_ratios=(1, 1, 1), w_pad=2) as panels:
        for axes, key, ylabel in zip(panels, ("seconds", "tokens"), ("seconds", "generated tokens"), strict=False):
            values = {
                WAYS[way].title: [row[key] for row in record["rounds"] if row["way"] == way and row["rate"]]
                for way in DRAWN
            }
            colors = {WAYS[way].title: WAYS[way].color for way in DRAWN}
            title = f"{ylabel.capitalize()} per group that teaches"
            lines(axes, RATES, values, colors=colors, title=title, xlabel="success rate", ylabel=ylabel)
            axes.set_yscale("log")
            _scale_rates(axes, RATES[::2])
        panels[0].legend(frameon=False)
        _draw_weights(panels[2], record["weights"])


def _draw_weights(axes: Any, rows: Sequence[Row]) -> None:
    shown = {
        "no limit": (None, "ours", "#134e4a"),
        "N = 4 G": (4 * GROUP_SIZE, "ours", "#0f766e"),
        "N = 2 G": (2 * GROUP_SIZE, "ours", "#5eead4"),
        "N = 4 G, weighed G / n": (4 * GROUP_SIZE, "ours_weighed", "#f59e0b"),
    }
    chosen = [row for row in rows if row["estimator"] == "grpo" and row["group_size"] == GROUP_SIZE]
    values = {
        name: [row[key] for row in chosen if row["max_candidates"] == most] for name, (most, key, _) in shown.items()
    }
    colors = {name: color for name, (_, _, color) in shown.items()}
    title = f"Weight of a prompt in GRPO's gradient, G = {GROUP_SIZE}"
    lines(axes, WEIGHT_RATES, values, colors=colors, title=title, xlabel="success rate", ylabel="times plain GRPO's")
    _scale_rates(axes, WEIGHT_RATES)
    axes.axhline(1, color=INK, lw=1, ls=":", zorder=0)
    axes.legend(frameon=False)


def _scale_rates(axes: Any, ticks: Sequence[float]) -> None:
    """A logit scale, which gives space to rare successes and rare failures."""
    axes.set_xscale("logit")
    axes.set_xticks(ticks, [percent(rate) for rate in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def main() -> None:
    arguments = arguments_of(__doc__, "rewards.variance", repeats=25, plot=True)
    arguments.set_defaults(output=ROOT / "benchmarks/results/variance.json", plot=ROOT / "docs/images/variance.png")
    arguments = arguments.parse_args()
    model, tail = MODELS[MODEL].title, TAILS[MODEL].described()
    workload = {
        "rounds": f"{SEATS} groups of {GROUP_SIZE} that teach, at most {MAX_CANDIDATES} candidates of a prompt; "
        f"medians of {arguments.repeats} seeds, per group that teaches",
        "ways": {name: way._asdict() for name, way in WAYS.items()},
        "engine": f"{model} on one GPU as benchmarks/rollpacker.py has it, {PROMPT_TOKENS} prompt tokens",
        "lengths": f"log-normal, mean {tail['mean']:.0f} tokens, {tail['sigma']:.2f} within and "
        f"{tail['prompt_sigma']:.2f} between prompts, at most 8,192; independent of the reward",
        "grading": f"log-normal, median {GRADING_MEDIAN_S:g} s (slow: {SLOW_GRADING_S:g} s), {GRADING_SIGMA}",
        "mixed": f"success rates drawn from beta{MIXED}, of each prompt its own",
    }
    record = record_of_run(seed=arguments.seed, workload=workload)
    seeds = range(arguments.seed, arguments.seed + arguments.repeats)
    record["rounds"] = rounds(seeds)
    record["slow"] = rounds(seeds, SLOW_WAYS, SLOW_GRADING_S)
    record["weights"] = all_weights()
    publish(arguments, record, tables, draw)


if __name__ == "__main__":
    main()

"""Results of `benchmarks.rounds_simulated` -> tables in Markdown. Invariant: adds only what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.rounds_simulated.setup import BETWEEN_SHARE, MODELS
from benchmarks.tables import grid, number, percent

Row = Mapping[str, Any]


def tables(result: Mapping[str, Any]) -> str:
    parts = [_lengths(result), _times(result), _sweep(result), _shares(result), _queue_order(result)]
    parts.append(_whole_epochs(result))
    parts += [_order(title, rows) for title, rows in result["order"].items()]
    return "\n\n".join(parts)


def end_to_end(speed_up: float, rollout_share: float) -> float:
    """Of a step, when rollouts become so much faster and nothing else changes."""
    return 1 / (1 - rollout_share + rollout_share / speed_up)


def row_of(rows: Sequence[Row], prompts: float, responses: float) -> Row:
    return next(row for row in rows if (row["prompt_speculation"], row["response_speculation"]) == (prompts, responses))


def bound(synchronous: Row, both: Row) -> float | None:
    """Of a period's speed-up, if short rounds took no time: long rounds alone. None without long rounds."""
    if not both["num_long"]:
        return None
    return both["num_returned"] * synchronous["prompt_s"] / (both["num_long"] * both["long_s"])


def _lengths(result: Mapping[str, Any]) -> str:
    header = ["model / cap", "synchronous: longest", "P75", "short rounds: longest (least)", "P75"]
    header += ["long rounds: longest", "P75", "longest of short rounds, synchronous over it"]
    rows = []
    for name, settings in result["sweep"].items():
        synchronous, both = row_of(settings, 1, 1), row_of(settings, 1.25, 1.25)
        rows.append(
            [
                name,
                number(synchronous["short_longest"], 0),
                number(synchronous["short_p75"], 0),
                f"{number(both['short_longest'], 0)} ({number(both['short_least_longest'], 0)})",
                number(both["short_p75"], 0),
                number(both["long_longest"], 0),
                number(both["long_p75"], 0),
                f"{synchronous['short_longest'] / both['short_longest']:.1f}",
            ]
        )
    return grid("Lengths in tokens, both factors 1.25; longest: mean over rounds", header, rows)


def _times(result: Mapping[str, Any]) -> str:
    header = [
        "model / cap", "synchronous round, s", "short", "long", "mean", "× faster (over seeds)", "short rounds alone",
        "if short rounds were free", "end to end, rollout 70 %", "in the paper",
    ]  # fmt: skip
    rows = []
    for name, settings in result["sweep"].items():
        synchronous, both = row_of(settings, 1, 1), row_of(settings, 1.25, 1.25)
        model = MODELS[name]
        rows.append(
            [
                name,
                number(synchronous["round_s"], 1),
                number(both["short_s"], 1),
                number(both["long_s"], 1),
                number(both["round_s"], 1),
                _ranged(both),
                f"{synchronous['round_s'] / both['short_s']:.1f}",
                number(bound(synchronous, both), 2),
                f"{end_to_end(both['speed_up'], model.rollout_share):.2f}",
                f"{model.tail_batching:.2f}",
            ]
        )
    return grid("Times, both factors 1.25", header, rows)


def _ranged(row: Row) -> str:
    low, high = row["speed_up_range"]
    return f"{row['speed_up']:.2f} ({low:.2f} to {high:.2f})"


def _sweep(result: Mapping[str, Any]) -> str:
    header = ["setting"]
    for name in result["sweep"]:
        header += [f"{name}: mean round, s", "× synchronous's time", "wasted"]
    rows = []
    for position, first in enumerate(next(iter(result["sweep"].values()))):
        cells = [first["setting"]]
        for settings in result["sweep"].values():
            row = settings[position]
            cells += [number(row["round_s"], 1), number(1 / row["speed_up"], 2), percent(row["wasted_share"])]
        rows.append(cells)
    return grid("Time over whole periods, the share per returned prompt (Fig. 12)", header, rows)


def _shares(result: Mapping[str, Any]) -> str:
    header = [
        "model / cap", "variance between prompts", "responses 1.25x", "prompts 1.25x", "both 1.25x",
        "both over responses", "both over prompts", "longest of short rounds", "mean length: responses", "prompts",
        "both",
    ]  # fmt: skip
    rows = []
    for name, others in result["shares"].items():
        shares = {**others, f"{BETWEEN_SHARE:g}": result["sweep"][name]}
        for share, settings in sorted(shares.items()):
            responses, prompts, both = (row_of(settings, *its) for its in ((1, 1.25), (1.25, 1), (1.25, 1.25)))
            rows.append(
                [
                    name,
                    percent(float(share)),
                    *(f"{row['speed_up']:.2f}" for row in (responses, prompts, both)),
                    f"{both['speed_up'] / responses['speed_up']:.2f}",
                    f"{both['speed_up'] / prompts['speed_up']:.2f}",
                    number(both["short_longest"], 0),
                    *(_signed(row["length_bias"]) for row in (responses, prompts, both)),
                ]
            )
    return grid("How much prompts differ", header, rows)


def _signed(share: float | None) -> str:
    return "—" if share is None else f"{100 * share:+.1f} %"


def _queue_order(result: Mapping[str, Any]) -> str:
    header = [
        "setting",
        "× faster",
        "of the whole run",
        "long rounds, s",
        "rounds waited, mean",
        "most",
        "length by place",
    ]
    rows = [
        [
            row["setting"],
            f"{row['speed_up']:.2f}",
            f"{row['speed_up_of_run']:.2f}",
            number(row["long_s"], 1),
            f"{row['fairness']['mean_wait']:.2f}",
            str(row["fairness"]["max_wait"]),
            f"{row['fairness']['order_correlation']:+.2f}",
        ]
        for row in result["queue_order"][1:]
    ]
    return grid("Which of the queue a long round takes", header, rows)


def _whole_epochs(result: Mapping[str, Any]) -> str:
    rows = [
        [f"{int(num_prompts):,}", row["setting"], _ranged(row), number(row["num_short"], 1), number(row["num_long"], 1)]
        for num_prompts, settings in result["whole_epochs"].items()
        for row in settings[1:]
    ]
    header = ["prompts of an epoch", "setting", "× faster", "short rounds", "long rounds"]
    return grid("Epochs that come back whole", header, rows)


def _order(title: str, settings: Sequence[Row]) -> str:
    header = [
        "setting", "returned per prompt", "deferred", "rounds waited, mean", "most", "length by place",
        "mean length of a short round", "long round", "farthest round", "mean length of all",
    ]  # fmt: skip
    rows = []
    for row in settings:
        fair = row["fairness"]
        rows.append(
            [
                row["setting"],
                f"{fair['least_returns']} to {fair['most_returns']}",
                percent(fair["deferred_share"]),
                f"{fair['mean_wait']:.2f}",
                str(fair["max_wait"]),
                f"{fair['order_correlation']:+.2f}",
                _signed(fair["short_departure"]),
                _signed(fair["long_departure"]),
                percent(fair["largest_departure"]),
                _signed(row["length_bias"]),
            ]
        )
    return grid(f"Order, {title}", header, rows)

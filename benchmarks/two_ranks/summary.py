"""Medians of the steps of each way, and how they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.tables import grid, number, percent

Row = dict[str, Any]


def summarize(rows: Sequence[Row]) -> dict[str, Row]:
    """By way: medians over repeats, and of ratios within a repeat against `off`."""
    stayed = {row["repeat"]: row for row in rows if row["way"] == "off"}
    return {
        way: _summary([row for row in rows if row["way"] == way], stayed)
        for way in dict.fromkeys(r["way"] for r in rows)
    }


def _summary(rows: Sequence[Row], stayed: dict[int, Row]) -> Row:
    found = [each for row in rows for each in row["consolidations"]]
    with_siblings = [each for each in found if each["sibling_lost_s"] is not None]

    def middle(value: Callable[[Row], float]) -> float:
        return median(map(value, rows))

    return {
        "seconds": middle(lambda row: row["seconds"]),
        "times_off": middle(lambda row: row["seconds"] / stayed[row["repeat"]]["seconds"]),
        "busy_rank_s": middle(lambda row: sum(row["busy_s"])),
        "freed_rank_s": middle(lambda row: row["freed_rank_s"]),
        "freed_more_rank_s": middle(lambda row: row["freed_rank_s"] - stayed[row["repeat"]]["freed_rank_s"]),
        "freed_share": middle(lambda row: row["freed_rank_s"] / len(row["busy_s"]) / row["seconds"]),
        "num_moves": sum(row["num_moves"] for row in rows),
        "num_consolidations": len(found),
        "longest_move_s": max(row["longest_move_s"] for row in rows),
        "moving_share": sum(row["moving_s"] for row in rows) / sum(sum(row["busy_s"]) for row in rows),
        "decoding_lost_share": middle(lambda row: row["decoding_lost_share"]),
        "num_other_answers": sum(row["num_other_answers"] for row in rows),
        "kv_tokens": _median(each["kv_tokens"] for each in found),
        "undisturbed_lost_s": _median(row["undisturbed_lost_s"] for row in rows if row["num_moves"] == 0),
        "moved_lost_s": _median(each["moved_lost_s"] for each in found),
        "sibling_lost_s": _median(each["sibling_lost_s"] for each in with_siblings),
        "predicted_s": _median(each["predicted_s"] for each in found),
        "measured_over_predicted": _median(each["sibling_lost_s"] / each["predicted_s"] for each in with_siblings),
    }


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


def tables(result: Row) -> str:
    its = result["workload"]
    ways = result["ways"]
    steps = grid(
        f"{its['prompts']} candidates on two ranks, medians of {its['repeats']} steps",
        ["", "s", "× off", "freed rank-s", "more than off", "freed share", "moves", "longest move, s", "other answers"],
        [
            [
                way, number(row["seconds"], 2), number(row["times_off"], 3), number(row["freed_rank_s"], 2),
                number(row["freed_more_rank_s"], 2), percent(row["freed_share"], 0), number(row["num_moves"]),
                number(row["longest_move_s"], 3), number(row["num_other_answers"]),
            ]
            for way, row in ways.items()
        ],
    )  # fmt: skip
    moves = grid(
        "What a consolidation costs, medians",
        [
            "", "consolidations", "tokens", "a moved candidate loses, s", "one on the target loses, s", "predicted, s",
            "measured / predicted", "decoding lost", "engine cores between steps",
        ],
        [
            [
                way, number(row["num_consolidations"]),
                *(_told(row[name]) for name in (
                    "kv_tokens", "moved_lost_s", "sibling_lost_s", "predicted_s", "measured_over_predicted",
                )),
                percent(row["decoding_lost_share"], 2), percent(row["moving_share"], 2),
            ]
            for way, row in ways.items()
            if row["num_consolidations"]
        ],
    )  # fmt: skip
    noise = _told(ways["off"]["undisturbed_lost_s"])
    return f"{steps}\n\n{moves}\n\nWhere nothing moves, the median candidate seems to lose {noise} s in half a second."


def _told(value: float | None) -> str:
    return "" if value is None else number(value, 0 if value >= 100 else 3)

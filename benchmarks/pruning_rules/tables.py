"""Tables of a result, as Markdown. Invariant: shows what the JSON has, and adds nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.pruning_rules.learned import OTHERS, WAYS
from benchmarks.tables import grid

CELL = ("concentration", "auc", "rate")
KEPT = ("keep_ratio", "positive_ratio", "reward_variance", "no_variance", "quality", "error_of_q")


def report(record: Mapping[str, Any]) -> str:
    rows = record["learned"]
    parts = [grid("Signal to noise per generated token, as multiples of none's", ["spread", "AUC", "rate", *WAYS], [
        [*_cell(row), *(_ratio(row[way]["over_none"]["per_token"]) for way in WAYS)] for row in rows
    ])]  # fmt: skip
    parts.append(grid("The default beside the others", [
        "spread", "AUC", "rate", "per group: × random", "× none", "per token: × random", "× fewer", "× none",
        "free: × none", "advised × fewer", "advice",
    ], [[*_cell(row), *_beside(row["gradient"]), *_advised(row["advice"])] for row in rows]))  # fmt: skip
    for way in WAYS:
        lines = [[*_cell(row), *(shown(row[way][field]) for field in KEPT)] for row in rows]
        parts.append(
            grid(f"What is kept: {way}", ["spread", "AUC", "rate", *(f.replace("_", " ") for f in KEPT)], lines)
        )
    parts.append(targets(record["target"]))
    parts += [flat(record[part], part) for part in ("arrival", "calibration", "labels")]
    return "\n\n".join(parts)


def targets(found: Sequence[Mapping[str, Any]]) -> str:
    """Where the target holds, and every cell where it does not."""
    rows = [
        [each["way"], each["measure"], *(f"{each['holds'][o]} ({each['better'][o]} better)" for o in OTHERS),
         str(each["num_cells"])]
        for each in found
    ]  # fmt: skip
    table = grid(
        "At least as good within two standard errors", ["way", "measure", *(f"as {o}" for o in OTHERS), "cells"], rows
    )
    lines = [
        f"- {each['way']} < {v['than']}: spread {v['concentration']:g}, AUC {v['auc']:g}, rate {v['rate']:g}: "
        f"× {_ratio(v['ratio'])}"
        for each in found
        if each["measure"] == "per_token" and each["way"] == "gradient"
        for v in each["fails"]
    ]
    return "\n".join([table, "", *(lines or ["- gradient: holds everywhere"])])


def flat(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """Rows of plain values and of means with errors."""
    names = list(rows[0])
    return grid(
        title, [name.replace("_", " ") for name in names], [[shown(row[name]) for name in names] for row in rows]
    )


def shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{value['mean']:.3f} ± {value['error']:.3f}"
    if value is None:
        return "—"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cell(row: Mapping[str, Any]) -> list[str]:
    return [f"{row[name]:g}" for name in CELL]


def _ratio(value: Mapping[str, float] | None) -> str:
    return "—" if value is None else f"{value['mean']:.2f} ± {value['error']:.2f}"


def _beside(way: Mapping[str, Any]) -> list[str]:
    places = [("random", "quality"), ("none", "quality")]
    places += [(other, "per_token") for other in OTHERS]
    return [_ratio(way[f"over_{other}"][field]) for other, field in [*places, ("none", "per_token_free")]]


def _advised(advice: Mapping[str, Any]) -> list[str]:
    """The value that the report names, and what it advises over the seeds."""
    votes = [f"{advice[setting]} × {setting}" for setting in ("prune", "fewer") if advice[setting]]
    return [_ratio(advice["value"]), ", ".join(votes) or "—"]

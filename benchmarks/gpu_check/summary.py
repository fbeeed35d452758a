"""Writes `summary.md` of a lease from `lease.jsonl`."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from benchmarks.gpu_check.pieces import PIECES, Estimates
from benchmarks.gpu_check.record import Record


def summary(record: Record, estimates: Estimates) -> str:
    """Markdown: pieces that ran and how they ended, failed checks, and results of each piece."""
    ends: dict[str, dict[str, Any]] = {}
    failed: dict[str, list[dict[str, Any]]] = defaultdict(list)
    results: dict[str, dict[str, Any]] = defaultdict(dict)
    begun: list[dict[str, Any]] = []
    starts: dict[str, float] = {}
    for line in record.lines():
        kind = line["kind"]
        if kind == "begin":
            begun.append(line)
        elif kind == "start":
            starts[line["engine"]] = line["seconds"]
        elif kind == "check" and not line["passed"]:
            failed[line["piece"]].append(line)
        elif kind == "result":
            results[line["piece"]][line["name"]] = line["value"]
        elif kind == "end":
            if line["status"] == "skipped" and ends.get(line["piece"], line)["status"] != "skipped":
                continue  # it ran in an earlier call
            ends[line["piece"]] = line
    parts = ["# GPU check", *_head(begun), "", *_pieces(ends, estimates), ""]
    for piece in PIECES:
        if piece in results or piece in failed:
            parts += [f"## {piece}", "", PIECES[piece].shows + ".", ""]
            parts += [f"- **not so**: {_check(line)}" for line in failed[piece]]
            parts += [f"- {name}: {_value(value)}" for name, value in results[piece].items()]
            parts.append("")
    if starts:
        parts += ["## Engines", "", *(f"- {name} started in {seconds:.0f} s" for name, seconds in starts.items()), ""]
    return "\n".join(parts)


def _head(begun: list[dict[str, Any]]) -> list[str]:
    if not begun:
        return []
    last = begun[-1]
    gpu = last["hardware"]["gpu"] or f"no GPU ({last['hardware']['cpu']})"
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    rehearsed = " A rehearsal: sizes are small, and no number here is a measurement." if last["device"] == "cpu" else ""
    return ["", f"{gpu}; {versions}; {len(begun)} call(s), the last for {last['minutes']:g} minutes.{rehearsed}"]


def _pieces(ends: dict[str, dict[str, Any]], estimates: Estimates) -> list[str]:
    rows = ["| piece | ended | seconds | estimate | why |", "|---|---|---|---|---|"]
    for piece in PIECES:
        if (end := ends.get(piece)) is not None:
            why = (end["reason"] or "").strip().splitlines()
            said = why[-1].replace("|", "/")[:160] if why else ""
            rows.append(f"| {piece} | {end['status']} | {end['seconds']:.1f} | {estimates.piece(piece):g} | {said} |")
    return rows


def _check(line: dict[str, Any]) -> str:
    wanted = "" if line["wanted"] is None else f", wanted {_value(line['wanted'])}"
    return f"{line['what']}: {_value(line['value'])}{wanted}"


def _value(value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"median", "p25", "p75"}:
        return f"{value['median']:.4g} (quartiles {value['p25']:.4g} to {value['p75']:.4g})"
    if isinstance(value, dict):
        return "; ".join(f"{name} {_value(each)}" for name, each in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)

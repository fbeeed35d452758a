"""What passed where, as a table. Invariant: docs/versions.md has exactly what the result file says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SUITES = {"adapter": "adapter tests, no engine", "engine": "engine tests", "smoke": "a few of those"}
"""By name in the result file."""


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Of the versions' rows in the result file; a column for each suite that any of them has run."""
    columns = [suite for suite in SUITES if any(suite in row for row in rows.values())]
    lines = [
        f"| vLLM | {' | '.join(SUITES[suite] for suite in columns)} | what it lacks |",
        f"| --- |{' --- |' * (len(columns) + 1)}",
    ]
    for version, row in sorted(rows.items()):
        cells = [_passed(row.get(suite)) for suite in columns]
        lacks = "; ".join(line.partition(" (")[0] for line in row["lacks"]) or "nothing"
        lines.append(f"| {version} | {' | '.join(cells)} | {lacks} |")
    return "\n".join(lines)


def _passed(suite: Mapping[str, Any] | None) -> str:
    if suite is None:
        return "—"
    skipped = f", {suite['skipped']} skipped" if suite["skipped"] else ""
    return f"{suite['passed']} of {suite['passed'] + len(suite['failed'])}{skipped}"

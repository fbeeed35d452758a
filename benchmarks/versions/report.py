"""What passed where, as a table. Invariant: README has exactly what the result file says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SUITES = {"adapter": "adapter tests, no engine", "engine": "engine smoke test"}
"""By name in the result file."""


def table(result: Mapping[str, Any]) -> str:
    lines = [
        f"| vLLM | {' | '.join(SUITES.values())} | seconds | what it lacks |",
        f"| --- |{' --- |' * (len(SUITES) + 2)}",
    ]
    for version, row in sorted(result["vllm"].items()):
        ran = [row[suite] for suite in SUITES if suite in row]
        cells = [_passed(row.get(suite)) for suite in SUITES]
        seconds = round(sum(suite["seconds"] for suite in ran))
        lacks = "; ".join(line.partition(" (")[0] for line in row["lacks"]) or "nothing"
        lines.append(f"| {version} | {' | '.join(cells)} | {seconds} | {lacks} |")
    return "\n".join(lines)


def _passed(suite: Mapping[str, Any] | None) -> str:
    if suite is None:
        return "—"
    skipped = f", {suite['skipped']} skipped" if suite["skipped"] else ""
    return f"{suite['passed']} of {suite['passed'] + len(suite['failed'])}{skipped}"

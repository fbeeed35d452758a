"""Counts of a soak. Invariant: every violation is counted, and the first ones are kept in words."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

MAX_VIOLATIONS = 50
"""Number of violations kept in words. All are counted."""


@dataclass(slots=True)
class Tally:
    """Counts over all clients."""

    requests: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Kind of act -> number of acts (`acts`), of acts broken off (`disconnected`), and of answers by status."""
    violations: list[str] = field(default_factory=list)
    num_violations: int = 0

    def broken(self, kind: str, what: str) -> None:
        self.num_violations += 1
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(f"{kind}: {what}")

    def answered(self, kind: str, status: int, allowed: tuple[int, ...], text: str) -> None:
        self.requests[kind][str(status)] += 1
        if status not in allowed:
            self.broken(kind, f"answered {status}, allowed {allowed}: {text[:400]}")

    @property
    def totals(self) -> Counter[str]:
        return sum(self.requests.values(), Counter())

    def as_json(self) -> dict[str, Any]:
        totals = self.totals
        return {
            "num_acts": totals["acts"],
            "num_disconnected": totals["disconnected"],
            "answers_by_status": {key: totals[key] for key in sorted(totals) if key.isdecimal()},
            "num_answers_500_or_above": sum(n for key, n in totals.items() if key.isdecimal() and int(key) >= 500),
            "by_kind": {kind: dict(sorted(counts.items())) for kind, counts in sorted(self.requests.items())},
            "num_violations": self.num_violations,
            "violations": self.violations,
        }

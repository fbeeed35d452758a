"""Groups in which nothing runs and that wait for siblings, the one that has waited longest first.

Invariant: there are at most `max_number`, and each waits at most `max_wait_s`, as far as anybody looks.
"""

from __future__ import annotations

from vllm_rollout.config import MAX_IDLE_GROUPS, MAX_IDLE_S


class WaitingGroups:
    """By id. Time is any clock's; a caller without one lets it stand still, and nothing is too old."""

    def __init__(self, max_number: int = MAX_IDLE_GROUPS, max_wait_s: float = MAX_IDLE_S) -> None:
        self._max_number = max_number
        self._max_wait_s = max_wait_s
        self._since_s: dict[str, float] = {}
        """In the order in which they began to wait."""

    def __len__(self) -> int:
        return len(self._since_s)

    def add(self, group_id: str, now_s: float) -> str | None:
        """It begins to wait; returns the one that is to be forgotten for it."""
        self._since_s.pop(group_id, None)
        self._since_s[group_id] = now_s
        return self._oldest() if len(self._since_s) > self._max_number else None

    def discard(self, group_id: str) -> None:
        """It waits no longer, if it did."""
        self._since_s.pop(group_id, None)

    def expire(self, now_s: float) -> list[str]:
        """Those that have waited too long, and are to be forgotten."""
        expired = []
        while self._since_s and now_s - next(iter(self._since_s.values())) > self._max_wait_s:
            expired.append(self._oldest())
        return expired

    def _oldest(self) -> str:
        oldest = next(iter(self._since_s))
        del self._since_s[oldest]
        return oldest

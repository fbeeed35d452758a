"""Groups by id, some of which wait for siblings that have not come.

Invariant: a group waits for at most `max_wait_s`, if `forget_waiting` is called. At most `max_waiting` groups wait:
beyond that, the group that has waited longest is forgotten.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from vllm_rollout.config import MAX_IDLE_GROUPS, MAX_IDLE_S, UNMET_S

Known = TypeVar("Known")
"""The value that is stored for a group."""


class SiblingTable(Generic[Known]):
    """Groups by id. Times are seconds of any clock. A caller without a clock passes a constant, and no group
    expires."""

    def __init__(self, max_waiting: int = MAX_IDLE_GROUPS, max_wait_s: float = MAX_IDLE_S) -> None:
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._groups: dict[str, Known] = {}
        self._since_s: dict[str, float] = {}
        """Start time of each waiting group, oldest first."""
        self._untold: dict[str, float] = {}
        """Waiting groups that `overdue` has not returned yet, with their start times."""
        self._told: set[str] = set()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_waiting(self) -> int:
        return len(self._since_s)

    def find(self, group_id: str) -> Known | None:
        return self._groups.get(group_id)

    def put(self, group_id: str, group: Known) -> None:
        """Store a group whose sibling has come. It does not wait."""
        self._groups[group_id] = group
        self._since_s.pop(group_id, None)
        self._untold.pop(group_id, None)

    def remove(self, group_id: str) -> Known:
        """Remove a group that is over, or that goes on in another engine."""
        self._since_s.pop(group_id, None)
        self._untold.pop(group_id, None)
        self._told.discard(group_id)
        return self._groups.pop(group_id)

    def wait(self, group_id: str, now_s: float) -> str | None:
        """Mark a group as waiting. Returns the group that is forgotten to make place for it, if any."""
        self._since_s.pop(group_id, None)
        self._since_s[group_id] = now_s
        if group_id not in self._told:
            self._untold.pop(group_id, None)
            self._untold[group_id] = now_s
        return self._forget_oldest() if len(self._since_s) > self._max_waiting else None

    def forget_waiting(self, now_s: float) -> list[str]:
        """Forget groups that have waited too long, and return their ids."""
        forgotten = []
        while self._since_s and now_s - next(iter(self._since_s.values())) > self._max_wait_s:
            forgotten.append(self._forget_oldest())
        return forgotten

    def overdue(self, now_s: float) -> list[str]:
        """Groups that have waited for longer than `UNMET_S`. Each is returned once."""
        found = []
        while self._untold and now_s - next(iter(self._untold.values())) > UNMET_S:
            group_id = next(iter(self._untold))
            del self._untold[group_id]
            self._told.add(group_id)
            found.append(group_id)
        return found

    def _forget_oldest(self) -> str:
        oldest = next(iter(self._since_s))
        self.remove(oldest)
        return oldest

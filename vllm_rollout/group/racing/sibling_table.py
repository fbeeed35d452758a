"""Groups by id, some of which wait for siblings that have not come.

Invariant: a group that waits does so for at most `max_wait_s`, as far as anybody looks, and as one of at most
`max_waiting`, of which the one that has waited longest is forgotten first.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from vllm_rollout.config import MAX_IDLE_GROUPS, MAX_IDLE_S, UNMET_S

Known = TypeVar("Known")
"""What is known of a group."""


class SiblingTable(Generic[Known]):
    """Groups by id. Time is any clock's; a caller without one lets it stand still, and nothing is too old."""

    def __init__(self, max_waiting: int = MAX_IDLE_GROUPS, max_wait_s: float = MAX_IDLE_S) -> None:
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._groups: dict[str, Known] = {}
        self._since_s: dict[str, float] = {}
        """When each that waits began to, the first one first."""
        self._untold: dict[str, float] = {}
        """Those of them that `overdue` has not returned."""
        self._told: set[str] = set()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_waiting(self) -> int:
        return len(self._since_s)

    def find(self, group_id: str) -> Known | None:
        return self._groups.get(group_id)

    def put(self, group_id: str, group: Known) -> None:
        """A sibling of this group has come: it is known, and does not wait."""
        self._groups[group_id] = group
        self._since_s.pop(group_id, None)
        self._untold.pop(group_id, None)

    def remove(self, group_id: str) -> Known:
        """The group is over, or goes on elsewhere."""
        self._since_s.pop(group_id, None)
        self._untold.pop(group_id, None)
        self._told.discard(group_id)
        return self._groups.pop(group_id)

    def wait(self, group_id: str, now_s: float) -> str | None:
        """The group begins to wait. Returns the one that is forgotten for it, if any."""
        self._since_s.pop(group_id, None)
        self._since_s[group_id] = now_s
        if group_id not in self._told:
            self._untold.pop(group_id, None)
            self._untold[group_id] = now_s
        return self._forget_oldest() if len(self._since_s) > self._max_waiting else None

    def forget_waiting(self, now_s: float) -> list[str]:
        """Forgets groups that have waited too long, and returns which."""
        forgotten = []
        while self._since_s and now_s - next(iter(self._since_s.values())) > self._max_wait_s:
            forgotten.append(self._forget_oldest())
        return forgotten

    def overdue(self, now_s: float) -> list[str]:
        """Groups that have waited for longer than `UNMET_S`, each of them once."""
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

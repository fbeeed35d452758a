"""The groups of one engine, by id.

Invariant: a group that is over is not here. One in which nothing runs waits for siblings, at most `max_wait_s` as far
as anybody looks, and as one of at most `max_number`, of which the one that has waited longest goes first.
"""

from __future__ import annotations

from vllm_rollout.config import MAX_IDLE_GROUPS, MAX_IDLE_S
from vllm_rollout.group.lifecycle import Group, GroupTerms


class WaitingGroups:
    """Groups that wait for siblings, by id.

    Time is any clock's; a caller without one lets it stand still, and nothing is too old.
    """

    def __init__(self, max_number: int = MAX_IDLE_GROUPS, max_wait_s: float = MAX_IDLE_S) -> None:
        self._max_number = max_number
        self._max_wait_s = max_wait_s
        self._since_s: dict[str, float] = {}
        """When each began to wait, the first one first."""

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


class GroupTable:
    """All groups of one engine, by id. A group is forgotten when it is over.

    A group that waits for siblings which never come is forgotten after a while, or when too many others wait, too.
    """

    def __init__(self, max_idle: int = MAX_IDLE_GROUPS) -> None:
        self._groups: dict[str, Group] = {}
        self._idle = WaitingGroups(max_idle)

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_idle(self) -> int:
        """Groups in which nothing runs and that wait for siblings."""
        return len(self._idle)

    def find(self, group_id: str) -> Group | None:
        return self._groups.get(group_id)

    def open(self, group_id: str, terms: GroupTerms, *, audit: bool = False) -> Group:
        """The group of that id, made on these terms if there is none, `audit` included; it waits no longer."""
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = Group(terms, audit)
        self._idle.discard(group_id)
        return group

    def put(self, group_id: str, group: Group) -> None:
        """A group that was removed from a table."""
        assert group_id not in self._groups, f"group {group_id} is here already"
        self._groups[group_id] = group

    def remove(self, group_id: str) -> Group:
        """A group that goes on in another table."""
        self._idle.discard(group_id)
        return self._groups.pop(group_id)

    def forget_waiting(self, now_s: float) -> list[str]:
        """Forgets groups that have waited too long, and returns which."""
        expired = self._idle.expire(now_s)
        for group_id in expired:
            del self._groups[group_id]
        return expired

    def release(self, group_id: str, now_s: float = 0.0) -> bool:
        """Call after a settlement: forgets the group if it is over (True), bounds the number of idle ones."""
        group = self._groups.get(group_id)
        if group is None:
            return False
        if group.over:
            del self._groups[group_id]
            return True
        if not group.num_running:
            oldest = self._idle.add(group_id, now_s)
            if oldest is not None:
                del self._groups[oldest]
        return False

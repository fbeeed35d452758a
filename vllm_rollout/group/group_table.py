"""The groups of one engine, by id.

Invariant: a group that is over is not here; one that waits for siblings is, as long as it may.
"""

from __future__ import annotations

from vllm_rollout.config import MAX_IDLE_GROUPS
from vllm_rollout.group.lifecycle import Group, GroupTerms
from vllm_rollout.group.waiting import WaitingGroups


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

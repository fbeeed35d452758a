"""Chooses the rank of the next group: the rank with the fewest requests.

A group whose candidates come together is placed once. Siblings that come one by one (joined groups) follow the first of
them, as long as their group is remembered. If several processes place groups independently, siblings meet on the rank
that follows from the group's id, and still count in its load.

A rank that is held is kept empty: it gets only groups that are pinned to it.

A part may choose ranks by another rule: its face `rank` is a subclass of `Ranks`.

Invariants: siblings have one rank. A load is the work that was placed there and has not been removed, plus that of
other requests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from vllm_rollout.config import MAX_IDLE_GROUPS
from vllm_rollout.kernel.rules.sibling_table import SiblingTable


def agreed_rank(group_id: str, ranks: Collection[int]) -> int:
    """One of these ranks by the id only, so that processes without shared state choose the same.

    A rank that comes or goes changes the choice for its own groups only (rendezvous hashing).
    """
    return max(ranks, key=lambda rank: blake2b(f"{rank} {group_id}".encode(), digest_size=8).digest())


@dataclass(slots=True)
class _Siblings:
    rank: int
    num_to_come: int
    num_running: int = 0


@dataclass(slots=True, eq=False)
class PlacedGroup:
    """A group whose candidates started together."""

    rank: int
    num_left: int
    """Candidates that have not ended."""


class Ranks:
    """Ranks of the candidates of one API process. A part overrides `loads`, and `open` to `close`."""

    def __init__(
        self, num_ranks: int, first_turn: int = 0, *, alone: bool = True, max_idle: int = MAX_IDLE_GROUPS
    ) -> None:
        """Place candidates on `num_ranks` ranks.

        Args:
            first_turn: rank that the first tie goes to. Different processes should begin with different ranks.
            alone: no other process places candidates, so that siblings follow the rank remembered here.
            max_idle: groups without a running sibling that are remembered while they wait for others.
        """
        self.num_ranks = num_ranks
        self.num_candidates = [0] * num_ranks
        """Number of candidates that were placed here and have not left, by rank."""
        self.others: Sequence[int] = [0] * num_ranks
        """Estimated number of requests on each rank that were not placed here."""
        self.held: frozenset[int] = frozenset()
        """Ranks that are kept empty. Never all of them."""
        self._turn = first_turn % num_ranks
        self._alone = alone
        self._joined: SiblingTable[_Siblings] = SiblingTable(max_idle)

    def __len__(self) -> int:
        """Number of joined groups that are remembered."""
        return len(self._joined)

    @property
    def loads(self) -> list[float]:
        return [own + others for own, others in zip(self.num_candidates, self.others, strict=True)]

    def open(self, num_tokens: Mapping[int, int], rank: int | None = None, outlook: Any | None = None) -> PlacedGroup:
        """Place a group whose candidates come together, on `rank` if the user pins it. Call `close` at its end.

        `num_tokens`: tokens of each candidate at its start, by index. `outlook`: as of `GroupOrder.outlook`.
        """
        rank = self.next_rank() if rank is None else rank
        self.num_candidates[rank] += len(num_tokens)
        return PlacedGroup(rank, len(num_tokens))

    def begins(self, group: PlacedGroup, index: int) -> None:
        """Add a candidate that replaces a lost one."""
        group.num_left += 1
        self.num_candidates[group.rank] += 1

    def ended(self, group: PlacedGroup, index: int, num_tokens: int) -> None:
        """Remove a candidate that ended after `num_tokens` tokens."""
        group.num_left -= 1
        self.num_candidates[group.rank] -= 1

    def move(self, group: PlacedGroup, rank: int) -> None:
        """Record that a group runs on another rank now."""
        self.num_candidates[group.rank] -= group.num_left
        self.num_candidates[rank] += group.num_left
        group.rank = rank

    def close(self, group: PlacedGroup) -> None:
        """Remove a group that is over."""
        self.num_candidates[group.rank] -= group.num_left

    def next_rank(self) -> int:
        """The rank with the least load. Among equal ones, the next in turn."""
        loads = self.loads
        rank = min(self._open_ranks, key=lambda rank: (loads[rank], (rank - self._turn) % self.num_ranks))
        self._turn = (rank + 1) % self.num_ranks
        return rank

    def join(self, group_id: str, num_candidates: int, rank: int | None = None) -> int:
        """Place one sibling of `num_candidates`, and return its rank. `rank`: if the user pins the first sibling.

        Call `leave_joined` at its end.
        """
        siblings = self._joined.find(group_id)
        if siblings is None:
            if rank is None:
                rank = self.next_rank() if self._alone else agreed_rank(group_id, self._open_ranks)
            siblings = _Siblings(rank, num_candidates)
        self._joined.put(group_id, siblings)
        siblings.num_to_come -= 1
        siblings.num_running += 1
        self.num_candidates[siblings.rank] += 1
        return siblings.rank

    def move_joined(self, group_id: str, rank: int) -> None:
        """Record that these siblings run on another rank now. Siblings that come later follow them."""
        if (siblings := self._joined.find(group_id)) is not None:
            self.num_candidates[siblings.rank] -= siblings.num_running
            self.num_candidates[rank] += siblings.num_running
            siblings.rank = rank

    def forget_waiting(self, now_s: float) -> list[str]:
        """Forget joined groups that have waited too long for siblings, and return their ids."""
        return self._joined.forget_waiting(now_s)

    def leave_joined(self, group_id: str, *, refused: bool = False, now_s: float = 0.0) -> str | None:
        """Remove a sibling that has ended, or was refused. After a refusal, another one may still come in its place.

        A group is forgotten as the engine forgets it: when it is over, or when too many others wait for siblings.
        Returns the id of the forgotten group, or None.
        """
        siblings = self._joined.find(group_id)
        assert siblings is not None  # a group with a running sibling is never forgotten
        self.num_candidates[siblings.rank] -= 1
        siblings.num_running -= 1
        siblings.num_to_come += refused
        if siblings.num_running:
            return None
        if siblings.num_to_come <= 0:
            self._joined.remove(group_id)
            return group_id
        return self._joined.wait(group_id, now_s)

    @property
    def _open_ranks(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank not in self.held]

"""Loads of data-parallel ranks -> the rank of the next group.

A load is predicted remaining work (`group/ranks/work.py`). A candidate that nothing predicts, and a request that was
not placed here, count as the average of the candidates that are predicted; where there are none a load is a number of
candidates.

A group whose candidates come together is placed once. Siblings that come one by one (joined groups) follow the first of
them, as long as their group is remembered; where several processes place without telling each other they meet on the
rank that the group's id names, and count in its load all the same.

A rank that is held, because somebody keeps it empty, gets nothing that is not pinned to it.

A client with several servers places groups by this rule, too (`group/ranks/servers.py`). A server is then a rank, and
its size the number of its engines.

Invariants: siblings have one rank, and a load is the work that was placed there and has not been taken away, plus that
of others. A rank that somebody keeps empty is held, whoever else gave it back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from vllm_rollout.config import MAX_IDLE_GROUPS
from vllm_rollout.group.racing.sibling_table import SiblingTable
from vllm_rollout.group.ranks.work import RankWork, TokenCost, Work

ONE = Work(1)
"""A candidate that nothing predicts."""


def choose_rank(loads: Sequence[float], turn: int) -> int:
    """The rank with the least load; of equal ones the next in turn, from rank `turn` on."""
    return min(range(len(loads)), key=lambda rank: (loads[rank], (rank - turn) % len(loads)))


def agreed_rank(group_id: str, ranks: Collection[int]) -> int:
    """One of these ranks, which depends on the id only, so that processes which share nothing choose the same.

    A rank that comes or goes changes the choice for its own groups only (rendezvous hashing).
    """
    return max(ranks, key=lambda rank: blake2b(f"{rank} {group_id}".encode(), digest_size=8).digest())


@dataclass(slots=True)
class _Siblings:
    rank: int
    num_to_come: int
    num_running: int = 0


class Placement:
    """Where the candidates of one API process run."""

    def __init__(
        self, num_ranks: int, first_turn: int = 0, *, alone: bool = True, max_idle: int = MAX_IDLE_GROUPS
    ) -> None:
        """
        Args:
            first_turn: whose turn the first tie is; different processes had better begin differently.
            alone: no other process places candidates, so that siblings can follow what is remembered here.
            max_idle: groups without a running sibling that are remembered while they wait for others.
        """
        self.num_ranks = num_ranks
        self.others: Sequence[int] = [0] * num_ranks
        """Requests on each rank that were not placed here, as far as that is known."""
        self.sizes: Sequence[float] = [1] * num_ranks
        """Loads are divided by these."""
        self.token_cost = TokenCost()
        """What predicted work weighs; without a profile tokens are counted."""
        self._work = [RankWork() for _ in range(num_ranks)]
        self.held: frozenset[int] = frozenset()
        """Ranks that are kept empty; never all of them."""
        self._turn = first_turn % num_ranks
        self._alone = alone
        self._joined: SiblingTable[_Siblings] = SiblingTable(max_idle)

    def __len__(self) -> int:
        """Joined groups that are remembered."""
        return len(self._joined)

    @property
    def num_candidates(self) -> list[int]:
        """Placed here and not left, by rank."""
        return [work.num_predicted + work.num_others for work in self._work]

    @property
    def loads(self) -> list[float]:
        """The load of each rank."""
        weighed = [work.cost(self.token_cost) for work in self._work]
        num_predicted = sum(work.num_predicted for work in self._work)
        average = sum(weighed) / num_predicted if num_predicted else 1
        return [
            (load + average * (work.num_others + others)) / size
            for load, work, others, size in zip(weighed, self._work, self.others, self.sizes, strict=True)
        ]

    def next_rank(self) -> int:
        """The one with the least load; ties go in turn."""
        ranks = self._open_ranks
        turn = sum(rank < self._turn for rank in ranks)
        loads = self.loads
        rank = ranks[choose_rank([loads[rank] for rank in ranks], turn)]
        self._turn = (rank + 1) % self.num_ranks
        return rank

    def place(self, work: Work, rank: int | None = None) -> int:
        """The rank of a group whose candidates come together; `rank` where the user pins it. Then call `leave`."""
        if rank is None:
            rank = self.next_rank()
        self._work[rank].add(work)
        return rank

    def change(self, rank: int, before: Work, after: Work) -> None:
        """So much is left of what was placed."""
        self._work[rank].add(before, -1)
        self._work[rank].add(after)

    def leave(self, rank: int, work: Work) -> None:
        """`work`: what was left of it."""
        self._work[rank].add(work, -1)

    def join(self, group_id: str, num_candidates: int, rank: int | None = None) -> int:
        """The rank of one sibling, of `num_candidates` in all; `rank` where the user pins the first of them. Call
        `leave_joined` at its end."""
        siblings = self._joined.find(group_id)
        if siblings is None:
            if rank is None:
                rank = self.next_rank() if self._alone else agreed_rank(group_id, self._open_ranks)
            siblings = _Siblings(rank, num_candidates)
        self._joined.put(group_id, siblings)
        siblings.num_to_come -= 1
        siblings.num_running += 1
        self._work[siblings.rank].add(ONE)
        return siblings.rank

    def move_joined(self, group_id: str, rank: int) -> None:
        """These siblings run on another rank now, and those to come follow them."""
        if (siblings := self._joined.find(group_id)) is not None:
            self._work[siblings.rank].add(Work(siblings.num_running), -1)
            self._work[rank].add(Work(siblings.num_running))
            siblings.rank = rank

    def forget_waiting(self, now_s: float) -> list[str]:
        """Forgets joined groups that have waited too long for siblings; returns which."""
        return self._joined.forget_waiting(now_s)

    def leave_joined(self, group_id: str, *, refused: bool = False, now_s: float = 0.0) -> str | None:
        """A sibling has ended, or was refused: then another may still come in its place.

        A group is forgotten as the engine forgets it: when it is over, or when too many others wait for siblings that
        do not come. Returns which one was, if any.
        """
        siblings = self._joined.find(group_id)
        assert siblings is not None  # a group with a running sibling is never forgotten
        self._work[siblings.rank].add(ONE, -1)
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


LATE_S = 0.3
"""How late a count may be: vLLM's coordinator publishes every 0.1 s what an engine core tells after each of its steps.
With longer steps the others look like fewer or more for as long as a step takes."""


class OtherRequests:
    """Requests on each rank that were not placed by this process: ordinary ones, and what other processes have sent.

    They are estimated from counts of all requests on each rank, some time ago. Such a count may or may not have in it
    what was placed here, or has left, since shortly before; so all that is known is a range, from the count less the
    most that this process had there lately to the count less the least. Within it what was known before stands. So an
    estimate that is right stays right as long as the others stay the same, and none is further from what the last count
    has of others than what was placed here has changed lately.
    """

    def __init__(self, num_ranks: int) -> None:
        self.numbers = [0] * num_ranks
        """The estimate for each rank."""
        self._since_s = -float("inf")
        """When `_lately` began."""
        self._lately: list[tuple[int, int]] = [(0, 0)] * num_ranks
        """Least and most own candidates on each rank, in a time that is as long as a count may be late."""
        self._before: list[tuple[int, int]] = self._lately
        """The same in the time before that."""

    def look(self, counts: Sequence[int], own: Sequence[int], now_s: float) -> Sequence[int]:
        """The new estimate, which is wanted, or `own`, the candidates of this process on each rank, is about to change.

        counts: of all requests on each rank. Returns `numbers`.
        """
        age_s = now_s - self._since_s
        now = [(num, num) for num in own]
        if age_s >= LATE_S:
            self._before = self._lately if age_s < 2 * LATE_S else now
            self._lately, self._since_s = now, now_s
        else:
            self._lately = [
                (min(least, num), max(most, num)) for (least, most), (num, _) in zip(self._lately, now, strict=True)
            ]
        ranges = zip(self.numbers, counts, self._lately, self._before, strict=True)
        self.numbers = [
            max(0, count - max(a[1], b[1]), min(number, count - min(a[0], b[0]))) for number, count, a, b in ranges
        ]
        return self.numbers


TRAINER = "trainer"
"""Whoever drains over HTTP. Other owners are rollouts, by id, which free ranks until they are over."""
ALL_OWNERS = ""
"""The owner that gives a rank back in the name of all who keep it empty."""


class Holders:
    """Who keeps a rank empty."""

    def __init__(self) -> None:
        self._owners: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._owners)

    def change(self, owner: str, *, held: bool) -> None:
        """Whether this owner keeps it empty, from now on."""
        if held:
            self._owners.add(owner)
        elif owner == ALL_OWNERS:
            self._owners.clear()
        else:
            self._owners.discard(owner)

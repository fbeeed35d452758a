"""Chooses the rank of the next group from the loads of data-parallel ranks.

A load is predicted remaining work (`parts/moving/rules/work.py`). A candidate without a prediction, and a request that
was not placed here, count as the average of the predicted candidates. Without any of these, a load is a number of
candidates.

A group whose candidates come together is placed once. Siblings that come one by one (joined groups) follow the first of
them, as long as their group is remembered. If several processes place groups independently, siblings meet on the rank
that follows from the group's id, and still count in its load.

A rank that is held is kept empty: it gets only groups that are pinned to it.

A client with several servers also places groups by this rule (`parts/fleet/rules.py`). A server is then a rank, and
its size the number of its engines.

Invariants: siblings have one rank. A load is the work that was placed there and has not been removed, plus that of
other requests. A rank stays held as long as any owner keeps it empty.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from vllm_rollout.config import MAX_IDLE_GROUPS
from vllm_rollout.kernel.rules.sibling_table import SiblingTable
from vllm_rollout.parts.moving.rules.work import RankWork, TokenCost, Work

ONE = Work(1)
"""Work of a candidate without a prediction."""


def choose_rank(loads: Sequence[float], turn: int) -> int:
    """The rank with the least load. Among equal ones, the next in turn from rank `turn` on."""
    return min(range(len(loads)), key=lambda rank: (loads[rank], (rank - turn) % len(loads)))


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


class Placement:
    """Ranks of the candidates of one API process."""

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
        self.others: Sequence[int] = [0] * num_ranks
        """Estimated number of requests on each rank that were not placed here."""
        self.sizes: Sequence[float] = [1] * num_ranks
        """Size of each rank. Loads are divided by it."""
        self.token_cost = TokenCost()
        """Weights of predicted work. Without a profile, tokens are counted."""
        self._work = [RankWork() for _ in range(num_ranks)]
        self.held: frozenset[int] = frozenset()
        """Ranks that are kept empty. Never all of them."""
        self._turn = first_turn % num_ranks
        self._alone = alone
        self._joined: SiblingTable[_Siblings] = SiblingTable(max_idle)

    def __len__(self) -> int:
        """Number of joined groups that are remembered."""
        return len(self._joined)

    @property
    def num_candidates(self) -> list[int]:
        """Number of candidates that were placed here and have not left, by rank."""
        return [work.num_predicted + work.num_others for work in self._work]

    @property
    def loads(self) -> list[float]:
        weighed = [work.cost(self.token_cost) for work in self._work]
        num_predicted = sum(work.num_predicted for work in self._work)
        average = sum(weighed) / num_predicted if num_predicted else 1
        return [
            (load + average * (work.num_others + others)) / size
            for load, work, others, size in zip(weighed, self._work, self.others, self.sizes, strict=True)
        ]

    def next_rank(self) -> int:
        """The rank with the least load. Ties go in turn."""
        ranks = self._open_ranks
        turn = sum(rank < self._turn for rank in ranks)
        loads = self.loads
        rank = ranks[choose_rank([loads[rank] for rank in ranks], turn)]
        self._turn = (rank + 1) % self.num_ranks
        return rank

    def place(self, work: Work, rank: int | None = None) -> int:
        """Place a group whose candidates come together, on `rank` if the user pins it. Call `leave` at its end."""
        if rank is None:
            rank = self.next_rank()
        self._work[rank].add(work)
        return rank

    def change(self, rank: int, before: Work, after: Work) -> None:
        """Replace the remaining work of a placed group."""
        self._work[rank].add(before, -1)
        self._work[rank].add(after)

    def leave(self, rank: int, work: Work) -> None:
        """Remove a group. `work`: its remaining work, as last reported."""
        self._work[rank].add(work, -1)

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
        self._work[siblings.rank].add(ONE)
        return siblings.rank

    def move_joined(self, group_id: str, rank: int) -> None:
        """Record that these siblings run on another rank now. Siblings that come later follow them."""
        if (siblings := self._joined.find(group_id)) is not None:
            self._work[siblings.rank].add(Work(siblings.num_running), -1)
            self._work[rank].add(Work(siblings.num_running))
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
"""Largest age of a count, in seconds: vLLM's coordinator publishes every 0.1 s what engine cores report per step.

With longer steps, counts of other requests are wrong for as long as a step takes.
"""


class OtherRequests:
    """Number of requests on each rank that this process did not place: ordinary ones, and those of other processes.

    They are estimated from earlier counts of all requests on each rank. Such a count may or may not contain candidates
    that this process placed or removed shortly before. So only a range is known: the count less the most, and less the
    fewest, candidates that this process had there lately. Within the range, the earlier estimate is kept. A correct
    estimate therefore stays correct while the other requests stay the same. No estimate differs from the last count by
    more than the recent change of this process's candidates.
    """

    def __init__(self, num_ranks: int) -> None:
        self.numbers = [0] * num_ranks
        """The estimate for each rank."""
        self._since_s = -float("inf")
        """Start of `_lately`, in seconds."""
        self._lately: list[tuple[int, int]] = [(0, 0)] * num_ranks
        """(fewest, most) own candidates on each rank during the present period. A period is the largest age of a
        count."""
        self._before: list[tuple[int, int]] = self._lately
        """(fewest, most) own candidates on each rank during the previous period."""

    def look(self, counts: Sequence[int], own: Sequence[int], now_s: float) -> Sequence[int]:
        """Update the estimate. Call it before the estimate is read, and before `own` changes.

        counts: all requests on each rank. own: candidates of this process on each rank. Returns `numbers`.
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
"""Owner of drains over HTTP. All other owners are rollouts, by id, which free ranks until they are over."""
ALL_OWNERS = ""
"""Owner that gives a rank back in the name of all owners."""


class Holders:
    """Owners that keep a rank empty."""

    def __init__(self) -> None:
        self._owners: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._owners)

    def change(self, owner: str, *, held: bool) -> None:
        """Add this owner, or remove it if `held` is False. `ALL_OWNERS` removes all."""
        if held:
            self._owners.add(owner)
        elif owner == ALL_OWNERS:
            self._owners.clear()
        else:
            self._owners.discard(owner)

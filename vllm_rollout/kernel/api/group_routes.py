"""Ranks of the groups of this API process, and waiting for groups that move.

Invariant: a message to a group (a launch, an abort) goes to the rank that has the group, and not while the group moves.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from vllm_rollout.kernel.api.door import Door
from vllm_rollout.kernel.api.engine_calls import RankDied
from vllm_rollout.kernel.http.engine import Outlook
from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.rules.other_requests import OtherRequests
from vllm_rollout.kernel.rules.ranks import PlacedGroup, Ranks


class NoRankLeft(GracefulHTTPError):
    """All living ranks are drained."""


@dataclass(slots=True, eq=False)
class GroupRoute:
    """Route of one group to its engine core."""

    group_id: str
    rank: int
    """Rank of this API process that runs the group."""
    placed: PlacedGroup | None
    """The candidates that started together. None if candidates come one by one, each with a load of its own."""
    outlook: Outlook | None = None
    door: Door = field(default_factory=Door)
    """Shut while the group moves."""

    @asynccontextmanager
    async def launching(self) -> AsyncIterator[int]:
        """Rank for a new candidate. The group stays there inside the block."""
        async with self.door.passing():
            yield self.rank


class GroupRoutes:
    """Routes of running groups, by id."""

    def __init__(
        self,
        ranks: Ranks,
        request_counts: Callable[[], Sequence[int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`request_counts`: all requests on each rank, of all clients, slightly out of date. None: there are no other
        clients.
        """
        self.ranks = ranks
        self._request_counts = request_counts
        self._other_requests = OtherRequests(ranks.num_ranks)
        self._clock = clock
        self._routes: dict[str, GroupRoute] = {}
        self._dead: frozenset[int] = frozenset()

    def find(self, group_id: str) -> GroupRoute | None:
        return self._routes.get(group_id)

    def on_rank(self, rank: int) -> list[GroupRoute]:
        return [route for route in self._routes.values() if route.rank == rank]

    @property
    def held(self) -> frozenset[int]:
        """Drained ranks, used only if a client names them, and dead ranks."""
        return self.ranks.held

    def hold(self, ranks: frozenset[int]) -> None:
        """Hold exactly these ranks, and those that are dead."""
        self.ranks.held = ranks | self._dead

    def bury(self, rank: int) -> None:
        """Mark a rank as dead. It gets no more requests."""
        self._dead |= {rank}
        self.hold(self.held)

    def next_rank(self) -> int:
        """Rank with the least load. Raises: NoRankLeft."""
        self.check_open()
        self._look()
        return self.ranks.next_rank()

    @property
    def has_open(self) -> bool:
        """True if at least one rank takes groups."""
        return len(self.held) < self.ranks.num_ranks

    @property
    def any_lives(self) -> bool:
        """True if a rank has not died."""
        return len(self._dead) < self.ranks.num_ranks

    def check_open(self, pinned_rank: int | None = None) -> None:
        """Raises: NoRankLeft. RankDied or VLLMValidationError if the client's rank is dead or drained."""
        if pinned_rank in self._dead:
            raise RankDied.of(pinned_rank)
        if pinned_rank in self.held:
            raise VLLMValidationError(
                f"data_parallel_rank: rank {pinned_rank} is drained. Leave it out, name another rank, or restore it by "
                f"POST /v1/engines/{pinned_rank}/restore.",
                parameter="data_parallel_rank",
            )
        if not self.has_open:
            raise NoRankLeft(
                "every rank of the engine is drained, or has died. Restore one by POST /v1/engines/{rank}/restore; "
                "GET /v1/engines shows them.",
                HTTPStatus.SERVICE_UNAVAILABLE,
            )

    @property
    def any_moves(self) -> bool:
        """True if a group is between two ranks."""
        return not all(route.door.is_open for route in self._routes.values())

    @property
    def running(self) -> Collection[GroupRoute]:
        """Routes of all running groups."""
        return self._routes.values()

    def open(
        self,
        group_id: str,
        num_tokens: Mapping[int, int],
        pinned_rank: int | None = None,
        outlook: Outlook | None = None,
    ) -> GroupRoute:
        """Begin a group on the rank that the rule chooses, or on the client's rank.

        `num_tokens`: tokens of each candidate at its start, by index. Raises: as `check_open`.
        """
        self.check_open(pinned_rank)
        self._look()
        placed = self.ranks.open(num_tokens, pinned_rank, outlook)
        self._routes[group_id] = GroupRoute(group_id, placed.rank, placed, outlook)
        return self._routes[group_id]

    def begins(self, route: GroupRoute, index: int) -> None:
        """Add a candidate that replaces a lost one."""
        assert route.placed is not None
        self._look()
        self.ranks.begins(route.placed, index)

    def ended(self, route: GroupRoute, index: int, num_tokens: int) -> None:
        """Remove a candidate that ended after `num_tokens` tokens."""
        assert route.placed is not None
        self._look()
        self.ranks.ended(route.placed, index, num_tokens)

    def close(self, route: GroupRoute) -> None:
        assert route.placed is not None
        self._look()
        self.ranks.close(route.placed)
        if self._routes.get(route.group_id) is route:
            del self._routes[route.group_id]

    def join(
        self, group_id: str, num_candidates: int, pinned_rank: int | None, *, followed: GroupRoute | None = None
    ) -> GroupRoute:
        """Add a candidate of a group whose candidates come one by one.

        `followed`: the route of another group of the same candidate, which sets the rank. That rank may be drained.
        Raises: as `check_open`.
        """
        if followed is None:
            self.check_open(pinned_rank)
        elif (pinned_rank := followed.rank) in self._dead:
            raise RankDied.of(pinned_rank)
        self._look()
        for forgotten in self.ranks.forget_waiting(self._clock()):
            self._routes.pop(forgotten, None)
        rank = self.ranks.join(group_id, num_candidates, pinned_rank)
        if group_id not in self._routes:
            self._routes[group_id] = GroupRoute(group_id, rank, None)
        return self._routes[group_id]

    def leave_joined(self, route: GroupRoute, *, refused: bool) -> None:
        """Remove a candidate of a joined group that ended or was refused."""
        self._look()
        forgotten = self.ranks.leave_joined(route.group_id, refused=refused, now_s=self._clock())
        if forgotten is not None:
            self._routes.pop(forgotten, None)

    def arrived(self, route: GroupRoute, rank: int) -> None:
        """Note that a group runs on another rank now, unless it ended before it arrived."""
        self._look()
        if route.placed is None:
            self.ranks.move_joined(route.group_id, rank)
        elif self._routes.get(route.group_id) is route:
            self.ranks.move(route.placed, rank)
        route.rank = rank

    def _look(self) -> None:
        """Update the ranks' other load. Call this before loads change."""
        if self._request_counts is not None:
            own = self.ranks.num_candidates
            self.ranks.others = self._other_requests.look(self._request_counts(), own, self._clock())


def new_ranks(num_ranks: int, first_turn: int = 0, *, alone: bool = True) -> Ranks:
    """Ranks that are chosen by the rule of the last part with a face `rank`, else by the fewest requests."""
    rules: list[type[Ranks]] = [Ranks, *(rule for _, rule in faces("rank"))]
    return rules[-1](num_ranks, first_turn, alone=alone)

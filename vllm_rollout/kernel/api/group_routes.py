"""Ranks of the groups of this API process, and waiting for groups that move.

Invariant: a message to a group (a launch, an abort) goes to the rank that has the group, and not while the group moves.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from vllm_rollout.kernel.api.door import Door
from vllm_rollout.kernel.api.rank_died import RankDied
from vllm_rollout.kernel.http.engine import Outlook
from vllm_rollout.kernel.rules.fields import Migration
from vllm_rollout.parts.moving.rules.placement import OtherRequests, Placement
from vllm_rollout.parts.moving.rules.work import TokenCost, Work
from vllm_rollout.parts.shaping.rules.cost import CostModel

PRECISION = 32
"""Remaining tokens are predicted anew after 1 / `PRECISION` of a group's candidates have ended."""


class NoRankLeft(GracefulHTTPError):
    """All living ranks are drained."""


class GroupRoute:
    """Route of one group to its engine core."""

    def __init__(
        self,
        group_id: str,
        rank: int,
        num_tokens: Mapping[int, int],
        work: Work,
        *,
        joined: bool = False,
        outlook: Outlook | None = None,
    ) -> None:
        """`num_tokens`: tokens of each candidate at its start, by index. `work`: work of the candidates that start
        together.
        """
        self.group_id = group_id
        self.rank = rank
        """Rank of this API process that runs the group."""
        self.joined = joined
        """True if candidates come one by one, each with a load of its own."""
        self.outlook = outlook
        self.work = work
        """Remaining work of candidates that started together. It counts in the rank's load."""
        self._num_tokens = dict(num_tokens)
        """Tokens of each running candidate at age 0, by index. Negative for a candidate that starts later."""
        self._num_at_prediction = len(num_tokens)
        self._age = 0
        """Tokens that each candidate from the start has generated here, as of the last candidate's end."""
        self._door = Door()
        """Shut while the group moves."""

    @property
    def num_left(self) -> int:
        """Running candidates that started together."""
        return len(self._num_tokens)

    @property
    def migration(self) -> Migration:
        """Reasons for which the group may move without a drain."""
        return "off" if self.outlook is None else self.outlook.migration

    def predict(self) -> Work:
        """Remaining work now. The number of candidates is exact. Their tokens are as of the last prediction
        (`PRECISION`).
        """
        num_ended = self._num_at_prediction - self.num_left
        if self.num_left and 0 <= num_ended * PRECISION < self._num_at_prediction:
            return self.work._replace(num_candidates=self.num_left)
        self._num_at_prediction = self.num_left
        return work_of([before + self._age for before in self._num_tokens.values()], self.outlook)

    def begins(self, index: int) -> None:
        """Add a candidate that replaces a lost one."""
        self._num_tokens[index] = -self._age

    def ended(self, index: int, num_tokens: int) -> None:
        """Remove a candidate that ended after `num_tokens` tokens."""
        late = max(0, -self._num_tokens.pop(index))
        self._age = max(self._age, late + num_tokens)

    async def at_rest(self) -> None:
        """Wait until the group does not move."""
        await self._door.opened()

    @asynccontextmanager
    async def launching(self) -> AsyncIterator[int]:
        """Rank for a new candidate. The group stays there inside the block."""
        async with self._door.passing():
            yield self.rank

    @asynccontextmanager
    async def moving(self) -> AsyncIterator[None]:
        """Hold the group's messages during a move. Messages under way arrive first, later ones wait."""
        assert self._door.is_open, f"group {self.group_id} moves already"
        self._door.shut()
        try:
            await self._door.left_by_all()
            yield
        finally:
            self._door.open()


class GroupRoutes:
    """Routes of running groups, by id."""

    def __init__(
        self,
        placement: Placement,
        request_counts: Callable[[], Sequence[int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`request_counts`: all requests on each rank, of all clients, slightly out of date. None: there are no other
        clients.
        """
        self._placement = placement
        self._request_counts = request_counts
        self._other_requests = OtherRequests(placement.num_ranks)
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
        return self._placement.held

    def hold(self, ranks: frozenset[int]) -> None:
        """Hold exactly these ranks, and those that are dead."""
        self._placement.held = ranks | self._dead

    def bury(self, rank: int) -> None:
        """Mark a rank as dead. It gets no more requests."""
        self._dead |= {rank}
        self.hold(self.held)

    def leave_dead(self, rank: int) -> None:
        """Let later candidates of a dead rank's joined groups start on another rank."""
        for route in self.on_rank(rank):
            if route.joined and self.has_open:
                self.arrived(route, self.next_rank())

    def next_rank(self) -> int:
        """Rank with the least load. Raises: NoRankLeft."""
        self.check_open()
        self._look()
        return self._placement.next_rank()

    @property
    def has_open(self) -> bool:
        """True if at least one rank takes groups."""
        return len(self.held) < self._placement.num_ranks

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
    def movable(self) -> list[GroupRoute]:
        """Groups that may move without a drain of their rank."""
        return [route for route in self._routes.values() if route.migration != "off"]

    def weigh(self, cost: CostModel) -> None:
        """Compare work by this cost from now on."""
        self._placement.token_cost = TokenCost.of(cost)

    def open(
        self,
        group_id: str,
        num_tokens: Mapping[int, int],
        pinned_rank: int | None = None,
        outlook: Outlook | None = None,
    ) -> GroupRoute:
        """Begin a group on the rank of the placement, or on the client's rank.

        `num_tokens`: tokens of each candidate at its start, by index. Raises: as `check_open`.
        """
        self.check_open(pinned_rank)
        self._look()
        work = work_of(num_tokens.values(), outlook)
        rank = self._placement.place(work, pinned_rank)
        self._routes[group_id] = GroupRoute(group_id, rank, num_tokens, work, outlook=outlook)
        return self._routes[group_id]

    def begins(self, route: GroupRoute, index: int) -> None:
        """Add a candidate that replaces a lost one."""
        route.begins(index)
        self._predict(route)

    def ended(self, route: GroupRoute, index: int, num_tokens: int) -> None:
        """Remove a candidate that ended after `num_tokens` tokens."""
        route.ended(index, num_tokens)
        self._predict(route)

    def close(self, route: GroupRoute) -> None:
        self._look()
        self._placement.leave(route.rank, route.work)
        if self._routes.get(route.group_id) is route:
            del self._routes[route.group_id]

    def join(self, group_id: str, num_candidates: int, pinned_rank: int | None) -> GroupRoute:
        """Add a candidate of a group whose candidates come one by one. Raises: as `check_open`."""
        self.check_open(pinned_rank)
        self._look()
        for forgotten in self._placement.forget_waiting(self._clock()):
            self._routes.pop(forgotten, None)
        rank = self._placement.join(group_id, num_candidates, pinned_rank)
        if group_id not in self._routes:
            self._routes[group_id] = GroupRoute(group_id, rank, {}, Work(0), joined=True)
        return self._routes[group_id]

    def leave_joined(self, route: GroupRoute, *, refused: bool) -> None:
        """Remove a candidate of a joined group that ended or was refused."""
        self._look()
        forgotten = self._placement.leave_joined(route.group_id, refused=refused, now_s=self._clock())
        if forgotten is not None:
            self._routes.pop(forgotten, None)

    def arrived(self, route: GroupRoute, rank: int) -> None:
        """Note that a group runs on another rank now, unless it ended before it arrived."""
        self._look()
        if route.joined:
            self._placement.move_joined(route.group_id, rank)
        elif self._routes.get(route.group_id) is route:
            self._placement.leave(route.rank, route.work)
            self._placement.place(route.work, rank)
        route.rank = rank

    def _predict(self, route: GroupRoute) -> None:
        self._look()
        before, route.work = route.work, route.predict()
        self._placement.change(route.rank, before, route.work)

    def _look(self) -> None:
        """Update the ranks' other load. Call this before the placement changes."""
        if self._request_counts is not None:
            own = self._placement.num_candidates
            self._placement.others = self._other_requests.look(self._request_counts(), own, self._clock())


def work_of(num_tokens: Collection[int], outlook: Outlook | None) -> Work:
    """Work of candidates that have these numbers of output tokens."""
    if outlook is None:
        return Work(len(num_tokens))
    return Work.of(num_tokens, outlook.lengths, outlook.max_tokens, outlook.prompt_tokens)

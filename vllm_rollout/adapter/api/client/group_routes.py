"""Where the groups of this API process run, and who has to wait while one of them moves.

Invariant: what is sent to a group (a launch, an abort) is sent to the rank that has it, and not while it is on its way.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from vllm_rollout.adapter.api.calls.rank_client import RankDied
from vllm_rollout.adapter.api.client.door import Door
from vllm_rollout.group.lengths.cost import CostModel
from vllm_rollout.group.plans.fields import Migration
from vllm_rollout.group.ranks.placement import OtherRequests, Placement
from vllm_rollout.group.ranks.work import TokenCost, Work
from vllm_rollout.server.engine import Outlook

PRECISION = 32
"""Tokens to come are predicted anew when a share of 1 / `PRECISION` of a group's candidates has ended since."""


class NoRankLeft(GracefulHTTPError):
    """All ranks that live are drained."""


class GroupRoute:
    """One group's way to its engine core."""

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
        """num_tokens: of each candidate, by index, when it begins; `work`: what those that come together have to do."""
        self.group_id = group_id
        self.rank = rank
        """One of those that this API process calls."""
        self.joined = joined
        """Its candidates come one by one, and each counts for itself."""
        self.outlook = outlook
        self.work = work
        """What is left of that; it counts in the load of the rank."""
        self._num_tokens = dict(num_tokens)
        """What each that has not ended had at age 0; less than nothing: it comes later."""
        self._num_at_prediction = len(num_tokens)
        self._age = 0
        """Tokens that candidates have generated here which began with the group, as the last that ended has told."""
        self._door = Door()
        """Shut while it moves."""

    @property
    def num_left(self) -> int:
        """Candidates that came together and have not ended."""
        return len(self._num_tokens)

    @property
    def migration(self) -> Migration:
        """What it may move for when nobody drains its rank."""
        return "off" if self.outlook is None else self.outlook.migration

    def predict(self) -> Work:
        """What is left of it now. The number of candidates is exact, their tokens are as of `PRECISION`."""
        num_ended = self._num_at_prediction - self.num_left
        if self.num_left and 0 <= num_ended * PRECISION < self._num_at_prediction:
            return self.work._replace(num_candidates=self.num_left)
        self._num_at_prediction = self.num_left
        return work_of([before + self._age for before in self._num_tokens.values()], self.outlook)

    def begins(self, index: int) -> None:
        """A candidate comes late, in the place of one that was lost."""
        self._num_tokens[index] = -self._age

    def ended(self, index: int, num_tokens: int) -> None:
        """After so many tokens."""
        late = max(0, -self._num_tokens.pop(index))
        self._age = max(self._age, late + num_tokens)

    async def at_rest(self) -> None:
        """Wait until it does not move."""
        await self._door.opened()

    @asynccontextmanager
    async def launching(self) -> AsyncIterator[int]:
        """The rank to which a candidate is sent now; the group stays there until it is sent."""
        async with self._door.passing():
            yield self.rank

    @asynccontextmanager
    async def moving(self) -> AsyncIterator[None]:
        """While it moves. What is being sent to it arrives first; whoever has more for it waits."""
        assert self._door.is_open, f"group {self.group_id} moves already"
        self._door.shut()
        try:
            await self._door.left_by_all()
            yield
        finally:
            self._door.open()


class GroupRoutes:
    """Routes of the groups that run, by id."""

    def __init__(
        self,
        placement: Placement,
        request_counts: Callable[[], Sequence[int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """request_counts: of all requests on each rank, whoever sent them, a while ago; None: nobody else matters."""
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
        """Ranks that nothing is sent to unless a client names them, and dead ones."""
        return self._placement.held

    def hold(self, ranks: frozenset[int]) -> None:
        """These are held from now on, beside those that are dead."""
        self._placement.held = ranks | self._dead

    def bury(self, rank: int) -> None:
        """It is dead: nothing goes there any more."""
        self._dead |= {rank}
        self.hold(self.held)

    def leave_dead(self, rank: int) -> None:
        """What still comes of the joined groups of a dead rank begins elsewhere."""
        for route in self.on_rank(rank):
            if route.joined and self.has_open:
                self.arrived(route, self.next_rank())

    def next_rank(self) -> int:
        """Where to go next: the least load. Raises: NoRankLeft."""
        self.check_open()
        self._look()
        return self._placement.next_rank()

    @property
    def has_open(self) -> bool:
        """Some rank takes groups."""
        return len(self.held) < self._placement.num_ranks

    def check_open(self, pinned_rank: int | None = None) -> None:
        """Raises: NoRankLeft; RankDied, VLLMValidationError for a rank that a client names and that takes nothing."""
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
        """Groups that may move when nobody drains their rank."""
        return [route for route in self._routes.values() if route.migration != "off"]

    def weigh(self, cost: CostModel) -> None:
        """Work is compared by what it costs from now on."""
        self._placement.token_cost = TokenCost.of(cost)

    def open(
        self,
        group_id: str,
        num_tokens: Mapping[int, int],
        pinned_rank: int | None = None,
        outlook: Outlook | None = None,
    ) -> GroupRoute:
        """A group begins, on the rank that the placement chooses or the client names. `num_tokens`: that its candidates
        have, by index. Raises: as `check_open`."""
        self.check_open(pinned_rank)
        self._look()
        work = work_of(num_tokens.values(), outlook)
        rank = self._placement.place(work, pinned_rank)
        self._routes[group_id] = GroupRoute(group_id, rank, num_tokens, work, outlook=outlook)
        return self._routes[group_id]

    def begins(self, route: GroupRoute, index: int) -> None:
        """A candidate takes the place of one that was lost."""
        route.begins(index)
        self._predict(route)

    def ended(self, route: GroupRoute, index: int, num_tokens: int) -> None:
        """A candidate has, after so many tokens."""
        route.ended(index, num_tokens)
        self._predict(route)

    def close(self, route: GroupRoute) -> None:
        self._look()
        self._placement.leave(route.rank, route.work)
        if self._routes.get(route.group_id) is route:
            del self._routes[route.group_id]

    def join(self, group_id: str, num_candidates: int, pinned_rank: int | None) -> GroupRoute:
        """A sibling of a group whose candidates come one by one. Raises: as `check_open`."""
        self.check_open(pinned_rank)
        self._look()
        for forgotten in self._placement.forget_waiting(self._clock()):
            self._routes.pop(forgotten, None)
        rank = self._placement.join(group_id, num_candidates, pinned_rank)
        if group_id not in self._routes:
            self._routes[group_id] = GroupRoute(group_id, rank, {}, Work(0), joined=True)
        return self._routes[group_id]

    def leave_joined(self, route: GroupRoute, *, refused: bool) -> None:
        """A sibling has ended, or was refused."""
        self._look()
        forgotten = self._placement.leave_joined(route.group_id, refused=refused, now_s=self._clock())
        if forgotten is not None:
            self._routes.pop(forgotten, None)

    def arrived(self, route: GroupRoute, rank: int) -> None:
        """It runs on another rank now, unless it was over before it arrived."""
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
        """Before what was placed changes: see what else the ranks have."""
        if self._request_counts is not None:
            own = self._placement.num_candidates
            self._placement.others = self._other_requests.look(self._request_counts(), own, self._clock())


def work_of(num_tokens: Collection[int], outlook: Outlook | None) -> Work:
    """The work of candidates that have so many output tokens."""
    return Work(len(num_tokens)) if outlook is None else outlook.work(num_tokens)

"""Where the groups of this API process run, and who has to wait while one of them moves.

Invariant: what is sent to a group (a launch, an abort) is sent to the rank that has it, and not while it is on its way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from vllm_rollout.group.history import LengthMoments
from vllm_rollout.group.placement import Placement
from vllm_rollout.server.engine import Mobility


class GroupRoute:
    """One group's way to its engine core."""

    def __init__(
        self, group_id: str, rank: int, num_candidates: int, *, joined: bool = False, mobility: Mobility | None = None
    ) -> None:
        self.group_id = group_id
        self.rank = rank
        """Of those that this API process calls."""
        self.num_candidates = num_candidates
        """That came together, and count in the load of the rank."""
        self.joined = joined
        """Its candidates come one by one, and each counts for itself."""
        self.num_left = num_candidates
        """That have not ended."""
        self.mobility = mobility
        """Of a group that may move when nobody drains its rank."""
        self.lengths: LengthMoments | None = None
        """What predicts its lengths, as it was known when they were first asked for: what ends first is short."""
        self.is_predicted = False
        """They were asked for."""
        self._at_rest = _event(is_set=True)
        self._num_launching = 0
        self._all_launched = _event(is_set=True)

    @property
    def moves(self) -> bool:
        return not self._at_rest.is_set()

    async def at_rest(self) -> None:
        """Wait until it does not move."""
        await self._at_rest.wait()

    @asynccontextmanager
    async def launching(self) -> AsyncIterator[int]:
        """The rank to which a candidate is sent now; the group stays there until it is sent."""
        await self._at_rest.wait()
        self._num_launching += 1
        self._all_launched.clear()
        try:
            yield self.rank
        finally:
            self._num_launching -= 1
            if not self._num_launching:
                self._all_launched.set()

    @asynccontextmanager
    async def moving(self) -> AsyncIterator[None]:
        """While it moves. What is being sent to it arrives first; whoever has more for it waits."""
        assert not self.moves, f"group {self.group_id} moves already"
        self._at_rest.clear()
        try:
            await self._all_launched.wait()
            yield
        finally:
            self._at_rest.set()


class GroupRoutes:
    """Routes of the groups that run, by id."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._routes: dict[str, GroupRoute] = {}

    def find(self, group_id: str) -> GroupRoute | None:
        return self._routes.get(group_id)

    def on_rank(self, rank: int) -> list[GroupRoute]:
        return [route for route in self._routes.values() if route.rank == rank]

    @property
    def held(self) -> frozenset[int]:
        """Ranks that nothing is sent to unless a client names them."""
        return self._placement.held

    def hold(self, ranks: frozenset[int]) -> None:
        self._placement.held = ranks

    def next_rank(self) -> int:
        """Where to go next: the least load."""
        return self._placement.next_rank()

    @property
    def movable(self) -> list[GroupRoute]:
        """Groups that may move when nobody drains their rank."""
        return [route for route in self._routes.values() if route.mobility is not None]

    def open(
        self, group_id: str, num_candidates: int, pinned_rank: int | None, mobility: Mobility | None = None
    ) -> GroupRoute:
        """A group begins, on the rank that the placement chooses or the client names."""
        rank = self._placement.place(num_candidates, pinned_rank)
        route = self._routes[group_id] = GroupRoute(group_id, rank, num_candidates, mobility=mobility)
        return route

    def close(self, route: GroupRoute) -> None:
        self._placement.leave(route.rank, route.num_candidates)
        if self._routes.get(route.group_id) is route:
            del self._routes[route.group_id]

    def join(self, group_id: str, num_candidates: int, pinned_rank: int | None) -> GroupRoute:
        """A sibling of a group whose candidates come one by one."""
        rank = self._placement.join(group_id, num_candidates, pinned_rank)
        if group_id not in self._routes:
            self._routes[group_id] = GroupRoute(group_id, rank, 0, joined=True)
        return self._routes[group_id]

    def leave_joined(self, route: GroupRoute, *, refused: bool) -> None:
        """A sibling has ended, or was refused."""
        forgotten = self._placement.leave_joined(route.group_id, refused=refused)
        if forgotten is not None:
            self._routes.pop(forgotten, None)

    def arrived(self, route: GroupRoute, rank: int) -> None:
        """It runs on another rank now."""
        if route.joined:
            self._placement.move_joined(route.group_id, rank)
        else:
            self._placement.leave(route.rank, route.num_candidates)
            self._placement.place(route.num_candidates, rank)
        route.rank = rank


def _event(*, is_set: bool) -> asyncio.Event:
    event = asyncio.Event()
    if is_set:
        event.set()
    return event

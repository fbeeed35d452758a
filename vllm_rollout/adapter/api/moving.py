"""The moving half of the service's engine: groups from one rank to another, and ranks that are kept empty.

    release  source       the group stops between two steps and is put into a parcel
    adopt    target       it goes on there
    confirm  source       the parcel is forgotten

All messages to one engine core go through one socket, so what is sent before a call is there before it. Who has
something for a group that moves waits (`group_routes.py`). Each API process moves its own groups.

Invariant: whatever fails, the group ends up in exactly one engine core: in the source until the target has it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from itertools import count
from typing import NamedTuple

from vllm.logger import init_logger

from vllm_rollout.adapter.api.client import RolloutAsyncLLM
from vllm_rollout.adapter.api.engine_calls import EngineCalls
from vllm_rollout.adapter.api.group_routes import GroupRoute
from vllm_rollout.adapter.api.rank_client import RankDied
from vllm_rollout.adapter.call_table import (
    ADOPT_GROUP,
    CONFIRM_MOVE,
    ENGINE_LOAD,
    HOLD,
    KEEP_GROUP,
    RELEASE_GROUP,
    GroupToAdopt,
    GroupToRelease,
    Released,
)
from vllm_rollout.group.load import DEAD_LOAD, EngineLoad
from vllm_rollout.group.moving import MoveOutcome
from vllm_rollout.server.engine import Drained, RequestError

logger = init_logger("vllm.vllm_rollout")

RELEASE_TRIES = 64
"""So often a group is asked for that has a token in flight, or an event that waits for the end of a step."""
LOOK_S = 0.05
"""Between two looks at an engine core that is to become empty."""
FOLLOW_S = 0.5
"""Where there are several API processes, each looks this often which ranks the others have put on hold."""

SHARED = "its candidates come through several API processes"
REASONS = {
    "busy": "its engine core is between two events",
    "in_flight": "a token of it is on its way",
}


class Move(NamedTuple):
    """What became of a move."""

    outcome: MoveOutcome
    reason: str = ""


class EngineMoves(EngineCalls):
    """The part of `server.engine.Engine` that knows the ranks and moves groups between them."""

    def __init__(self, client: RolloutAsyncLLM) -> None:
        super().__init__(client)
        self._epochs = count(1)
        self._one_move = asyncio.Lock()
        """Held while a group is in no engine core, and by calls that have to reach all groups."""
        self._following: asyncio.Task[None] | None = None

    async def engine_loads(self) -> list[EngineLoad]:
        loads = await self._call_each(ENGINE_LOAD, None)
        return [loads.get(rank, DEAD_LOAD) for rank in range(self.num_ranks)]

    async def drain(self, rank: int, timeout_s: float) -> Drained:
        held = self._held(await self.engine_loads())
        others = [each for each in range(self.num_ranks) if each != rank and each not in held]
        if not others:
            only = "It is the only one." if self.num_ranks == 1 else "It is the last one that is not drained."
            raise RequestError(
                f"rank {rank} cannot be drained: no other rank would take its groups. {only} "
                "Restore another one first, or start the server with more --data-parallel-size.",
                status=HTTPStatus.CONFLICT,
                param="rank",
            )
        started = time.monotonic()
        await self._call_rank(rank, HOLD, True)
        self._client.routes.hold(held | {rank})
        moves = await self._leave(rank)
        if not self._client.routes.has_open:
            await self.restore(rank)
            raise RequestError(
                f"rank {rank} cannot be drained: the others that took groups have died. See GET /v1/engines.",
                status=HTTPStatus.CONFLICT,
                param="rank",
            )
        while (load := (await self.engine_loads())[rank]).num_running + load.num_waiting:
            if not load.is_held or time.monotonic() - started >= timeout_s:
                break
            await asyncio.sleep(LOOK_S)
        if load.is_dead:
            raise RequestError(str(RankDied.of(rank)), status=HTTPStatus.SERVICE_UNAVAILABLE)
        reasons = Counter(move.reason for move in moves if move.outcome in ("stays", "failed", "lost"))
        num_moved = sum(move.outcome == "moved" for move in moves)
        num_left = load.num_running + load.num_waiting
        return Drained(load.is_held, num_moved, num_left, reasons, time.monotonic() - started)

    async def restore(self, rank: int) -> None:
        await self._call_rank(rank, HOLD, False)
        self._client.routes.hold(self._held(await self.engine_loads()))

    def follow_holds(self) -> None:
        """From now on leave ranks that other API processes put on hold."""
        if self.num_ranks > 1 and self._client.num_api_processes > 1:
            self._following = asyncio.create_task(self._follow())

    async def move_group(self, group_id: str, target: int) -> Move:
        """Move a group to another rank; also to its end when the one who waits for it goes away."""
        route = self._client.routes.find(group_id)
        if route is None:
            return Move("over")
        return await self._to_its_end(self._move(route, target))

    @staticmethod
    def _held(loads: Sequence[EngineLoad]) -> frozenset[int]:
        return frozenset(rank for rank, load in enumerate(loads) if load.is_held)

    async def _follow(self) -> None:
        try:
            while not self._client.errored:
                await asyncio.sleep(FOLLOW_S)
                held = self._held(await self.engine_loads())
                self._client.routes.hold(held)
                for rank in held:
                    if self._client.routes.on_rank(rank):
                        await self._leave(rank)
        except RequestError:  # a dead engine: whoever waits for its answers hears of it
            return

    async def _leave(self, rank: int) -> list[Move]:
        """Move all groups of this API process away from a rank."""
        routes, targets = self._client.routes, await self._drain_targets(rank)
        moves = []
        for route in routes.on_rank(rank):
            if not routes.has_open:  # the others have died meanwhile
                break
            moves.append(await self.move_group(route.group_id, targets.get(route.group_id, routes.next_rank())))
        return moves

    async def _drain_targets(self, rank: int) -> Mapping[str, int]:
        """Where the groups of a rank go that is to be emptied; those that are not named go to the least load."""
        return {}

    async def _move(self, route: GroupRoute, target: int) -> Move:
        if route.joined and self._client.num_api_processes > 1:
            return Move("stays", SHARED)
        async with self._one_move:
            if route.rank == target:
                return Move("stays", "it is there already")
            source, started = route.rank, time.monotonic()
            async with route.moving():
                move = await self._move_now(route, target)
        seconds = time.monotonic() - started
        self._client.rollout_metrics.group_moved(move.outcome, seconds)
        if move.outcome == "moved":
            logger.info("group %s moved from rank %d to %d in %.3f s", route.group_id, source, target, seconds)
        return move

    async def _move_now(self, route: GroupRoute, target: int) -> Move:
        wanted = GroupToRelease(route.group_id, next(self._epochs))
        try:
            released = await self._release(route.rank, wanted)
        except RequestError as error:  # the source has died, and the group with it
            return Move("lost", str(error))
        if released.outcome == "over":
            self._client.routes.arrived(route, target)  # it may not have begun
            return Move("over")
        if released.outcome != "released":
            await self._call_rank(route.rank, KEEP_GROUP, wanted)
            return Move("stays", released.reason or REASONS[released.outcome])
        try:
            await self._call_rank(target, ADOPT_GROUP, GroupToAdopt(*wanted, released.parcel))
            if target in self._client.life.dead:  # it died with the group, whose requests nobody looked for there
                raise RankDied.of(target)
        except Exception as error:
            logger.exception("rank %d did not adopt group %s of rank %d", target, route.group_id, route.rank)
            return await self._take_back(route, wanted, released, error)
        self._client.send_to(target, released.request_ids)
        source = route.rank
        self._client.routes.arrived(route, target)
        with suppress(RequestError):  # a source that has died has nothing to forget
            await self._call_rank(source, CONFIRM_MOVE, wanted)
        return Move("moved")

    async def _take_back(
        self, route: GroupRoute, wanted: GroupToRelease, released: Released, reason: Exception
    ) -> Move:
        """The target has not taken the group: it goes on in the source. Where that fails too, its candidates do."""
        try:
            await self._call_rank(route.rank, KEEP_GROUP, wanted)
        except Exception as error:
            logger.exception("group %s is lost", route.group_id)
            is_dead = route.rank in self._client.life.dead
            self._client.lose(released.request_ids, RankDied.of(route.rank) if is_dead else error)
            return Move("lost", str(error))
        return Move("failed", str(reason))

    async def _release(self, rank: int, wanted: GroupToRelease) -> Released:
        for _ in range(RELEASE_TRIES):
            released = await self._call_rank(rank, RELEASE_GROUP, wanted)
            if released.outcome not in ("in_flight", "busy"):
                break
        return released

"""The part of the service's engine that moves groups from one rank to another, and keeps ranks empty.

    release  source       the group stops between two steps and is packed
    adopt    target       it continues there
    confirm  source       the packed group is dropped

All messages to one engine core go through one socket, so a message sent before a call arrives before it. Requests for a
group that moves wait (`group_routes.py`). Each API process moves its own groups.

A rank that is kept empty stores the owners of the hold. API processes share the ranks and nothing else. Each checks
that other ranks take groups, holds the rank, and checks again. If two processes hold the last ranks at the same time,
at least one finds no other rank, and releases its hold.

Invariant: whatever fails, the group ends up in exactly one engine core: in the source until the target has it. A held
rank gets no group. While two ranks live, not all of them are held for longer than a call takes.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from itertools import count
from typing import NamedTuple

from vllm.logger import init_logger
from vllm.v1.engine.core_client import DPLBAsyncMPClient

from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.background import spawn, survived
from vllm_rollout.kernel.api.client import RolloutAsyncLLM
from vllm_rollout.kernel.api.engine_calls import EngineCalls, RankDied
from vllm_rollout.kernel.api.group_routes import GroupRoute
from vllm_rollout.kernel.http.engine import EngineStopped, RequestError
from vllm_rollout.parts.moving.calls import (
    ADOPT_GROUP,
    CONFIRM_MOVE,
    HOLD,
    KEEP_GROUP,
    RANK_STATE,
    RELEASE_GROUP,
    GroupToAdopt,
    GroupToRelease,
    Hold,
    Released,
)
from vllm_rollout.parts.moving.http.engine import Drained, MovesPart
from vllm_rollout.parts.moving.http.metrics import MovingMetrics
from vllm_rollout.parts.moving.rules.load import DEAD, GroupLoad, RankLoad, RankState
from vllm_rollout.parts.moving.rules.migration import MoveOutcome, plan_drain
from vllm_rollout.parts.moving.rules.placement import ALL_OWNERS, TRAINER
from vllm_rollout.parts.moving.rules.scaling import Progress, ScaleDown, plan_scale_down
from vllm_rollout.parts.shaping.api.lengths import EngineShaping
from vllm_rollout.parts.shaping.rules.moments import LengthMoments

logger = init_logger("vllm.vllm_rollout")

RELEASE_TRIES = 64
"""Attempts to release a group that has a token in flight, or an event that waits for the end of a step."""
LOOK_S = 0.05
"""Seconds between two checks of an engine core that is to become empty."""
FOLLOW_S = 0.5
"""Seconds between two checks for ranks that other API processes hold. A drain is answered after two such checks: until
then the other processes may send requests to the rank.
"""

SHARED = "its candidates come through several API processes"
REASONS = {
    "busy": "its engine core is between two events",
    "in_flight": "a token of it is on its way",
}


MayMove = Callable[[GroupRoute], bool]


class Move(NamedTuple):
    """Result of a move."""

    outcome: MoveOutcome
    reason: str = ""


class EngineMoves(MovesPart):
    """Moves groups."""

    def __init__(self, client: RolloutAsyncLLM, calls: EngineCalls, shaping: EngineShaping) -> None:
        self._client = client
        self._calls = calls
        self._shaping = shaping
        self._epochs = count(1)
        self._following: asyncio.Task[None] | None = None

    @property
    def num_ranks(self) -> int:
        return self._calls.num_ranks

    def refusal(self, *, priced: bool) -> str | None:
        if self._client.num_api_processes > 1:
            return (
                f"needs one API process, which knows all groups; this server has {self._client.num_api_processes}. "
                "Start it with --api-server-count 1."
            )
        if ServeOptions.of(self._client.vllm_config).beside_rust:
            return (
                "needs an API process that knows all groups, and vLLM's Rust front end starts others. Start the server "
                "without VLLM_USE_RUST_FRONTEND=1."
            )
        if priced and self._shaping.cost_model is None:
            return (
                "needs to know what a step and a prefill cost. Start the server with --rollout-profile FILE "
                "(`vllm-rollout profile` writes one)."
            )
        return None

    async def rank_states(self) -> list[RankState]:
        """States by rank. Raises: EngineStopped."""
        living = await self._calls.call_each(RANK_STATE, None)
        return [living.get(rank, DEAD) for rank in range(self.num_ranks)]

    async def rank_loads(self) -> Callable[[MayMove], list[RankLoad]]:
        """Ask for loads once. Returns a function: given which groups may move, it gives the load of each rank for the
        rules.
        """
        lengths = (await self._shaping.length_history([])).dataset  # they predict groups without an outlook
        states = await self.rank_states()
        return lambda may_move: [self._rank_load(rank, its, lengths, may_move) for rank, its in enumerate(states)]

    def _rank_load(self, rank: int, its: RankState, lengths: LengthMoments | None, may_move: MayMove) -> RankLoad:
        """Load of one rank. Groups that may not move count as other requests."""
        groups, other_tokens = [], 0
        for running in its.load.groups:
            route = self._client.routes.find(running.group_id)
            known = lengths if route is None or route.outlook is None else route.outlook.lengths
            group = GroupLoad.of(*running[:3], known, running.max_tokens)
            if route is not None and route.rank == rank and may_move(route):
                groups.append(group)
            else:
                other_tokens += group.kv_tokens
        return RankLoad(
            rank,
            tuple(groups),
            other_requests=its.num_requests - sum(group.num_candidates for group in groups),
            other_kv_tokens=other_tokens,
            kv_capacity_tokens=self._client.vllm_config.cache_config.kv_cache_size_tokens,
            max_num_seqs=self._client.vllm_config.scheduler_config.max_num_seqs,
            is_held=its.is_held,
            transfer=its.kv.transfer,
        )

    async def plan_scale_down(self, progress: Progress) -> ScaleDown:
        return plan_scale_down(progress, (await self.rank_loads())(lambda route: True))

    async def drain(self, rank: int, timeout_s: float, owner: str = TRAINER) -> Drained:
        started = time.monotonic()
        await self._calls.to_its_end(self._hold(rank, owner))
        moves = await self._leave(rank)
        if not self._client.routes.has_open:
            await self.restore(rank, owner)
            raise _last_one(rank, "The others that took groups have died. See GET /v1/engines.")
        told_s = time.monotonic() + (2 * FOLLOW_S if self._client.num_api_processes > 1 else 0.0)
        while (its := (await self.rank_states())[rank]).num_requests or time.monotonic() < told_s:
            if not its.is_held or time.monotonic() - started >= timeout_s:
                break
            await asyncio.sleep(LOOK_S)
        if its.is_dead:
            raise EngineStopped(str(RankDied.of(rank)), status=HTTPStatus.SERVICE_UNAVAILABLE)
        reasons = Counter(move.reason for move in moves if move.outcome in ("stays", "failed", "lost"))
        num_moved = sum(move.outcome == "moved" for move in moves)
        return Drained(its.is_held, num_moved, its.num_requests, reasons, time.monotonic() - started)

    async def restore(self, rank: int, owner: str = ALL_OWNERS) -> None:
        await self._calls.to_its_end(self._end_hold(rank, owner))

    async def _hold(self, rank: int, owner: str) -> None:
        """Keep a rank empty from now on. Raises: RequestError (409) if no other rank would take groups."""
        async with self._calls.none_moves:
            states = await self.rank_states()
            if not self._takers(states, rank):
                raise _last_one(rank, _why_last(states, rank))
            await self._calls.call_rank(rank, HOLD, Hold(owner, True))
            states = await self.rank_states()
            if not self._takers(states, rank):  # another API process drains the others at the same time
                await self._calls.call_rank(rank, HOLD, Hold(owner, False))
                raise _last_one(rank, "The others are being drained, too. Try again.")
            self._client.routes.hold(self._held(states))

    async def _end_hold(self, rank: int, owner: str) -> None:
        async with self._calls.none_moves:
            await self._calls.call_rank(rank, HOLD, Hold(owner, False))
            self._client.routes.hold(self._held(await self.rank_states()))

    def follow_holds(self) -> None:
        """Start to leave ranks that other API processes hold."""
        if self.num_ranks > 1 and self._client.num_api_processes > 1:
            self._following = spawn(self._follow(), "following holds")

    async def move_group(self, group_id: str, target: int) -> Move:
        """Move a group to another rank. The move completes even if its caller goes away."""
        route = self._client.routes.find(group_id)
        if route is None:
            return Move("over")
        return await self._calls.to_its_end(self._move(route, target))

    @staticmethod
    def _held(states: Sequence[RankState]) -> frozenset[int]:
        return frozenset(rank for rank, its in enumerate(states) if its.is_held)

    @classmethod
    def _takers(cls, states: Sequence[RankState], rank: int) -> frozenset[int]:
        """Ranks that take groups if this one does not."""
        return frozenset(range(len(states))) - cls._held(states) - {rank}

    async def _follow(self) -> None:
        before: frozenset[int] = frozenset()
        while not self._client.errored:
            await asyncio.sleep(FOLLOW_S)
            with survived("following holds"), suppress(EngineStopped):  # a dead engine is reported elsewhere
                async with self._calls.none_moves:
                    held = self._held(await self.rank_states())
                    if len(held) < self.num_ranks or held == before:  # else drains collide, and one is released
                        self._client.routes.hold(held)
                    before = held
                for rank in self._client.routes.held:
                    if self._client.routes.on_rank(rank):
                        await self._leave(rank)

    async def _leave(self, rank: int) -> list[Move]:
        """Move all groups of this API process away from a rank."""
        routes, loads = self._client.routes, (await self.rank_loads())(lambda route: True)
        targets = {move.group_id: move.target for move in plan_drain(loads, rank)}
        moves = []
        for route in routes.on_rank(rank):
            if not routes.has_open:  # the others have died meanwhile
                break
            # A group that came since then goes to the least load.
            moves.append(await self.move_group(route.group_id, targets.get(route.group_id, routes.next_rank())))
        return moves

    async def _move(self, route: GroupRoute, target: int) -> Move:
        if route.placed is None and self._client.num_api_processes > 1:
            return Move("stays", SHARED)
        async with self._calls.none_moves:
            routes = self._client.routes
            if target in routes.held and route.rank in routes.held and routes.has_open:
                target = routes.next_rank()  # it has to leave its rank, so any other rank will do
            if target in routes.held:
                return Move("stays", f"rank {target} takes no groups any more")
            if route.rank == target:
                return Move("stays", "it is there already")
            source, started = route.rank, time.monotonic()
            async with in_motion(route):
                move = await self._move_now(route, target)
        seconds = time.monotonic() - started
        self._client.rollout_metrics.of(MovingMetrics).group_moved(move.outcome, seconds)
        if move.outcome == "moved":
            logger.info("group %s moved from rank %d to %d in %.3f s", route.group_id, source, target, seconds)
        return move

    async def _move_now(self, route: GroupRoute, target: int) -> Move:
        source, wanted = route.rank, GroupToRelease(route.group_id, next(self._epochs))
        try:
            released = await self._release(source, wanted)
        except Exception as error:
            if source in self._client.living_ranks:
                logger.exception("rank %d did not release group %s", source, route.group_id)
            return await self._take_back(route, wanted, Move("failed", str(error)))
        if released.outcome == "over":
            self._client.routes.arrived(route, target)  # it may not have begun
            return Move("over")
        if released.outcome != "released":
            return await self._take_back(route, wanted, Move("stays", released.reason or REASONS[released.outcome]))
        try:
            await self._calls.call_rank(target, ADOPT_GROUP, GroupToAdopt(*wanted, released.parcel))
            if target not in self._client.living_ranks:  # it died with the group, whose requests were not known there
                raise RankDied.of(target)
        except Exception as error:
            logger.exception("rank %d did not adopt group %s of rank %d", target, route.group_id, source)
            return await self._take_back(route, wanted, Move("failed", str(error)))
        _send_to(self._client.engine_core, target, released.request_ids)
        self._client.routes.arrived(route, target)
        try:
            await self._calls.call_rank(source, CONFIRM_MOVE, wanted)
        except Exception:
            if source in self._client.living_ranks:  # a dead one has nothing to forget
                logger.exception("rank %d did not forget group %s", source, route.group_id)
        return Move("moved")

    async def _take_back(self, route: GroupRoute, wanted: GroupToRelease, move: Move) -> Move:
        """Let the group continue in the source. If that fails too, its candidates fail."""
        try:
            await self._calls.call_rank(route.rank, KEEP_GROUP, wanted)
        except Exception as error:
            is_dead = route.rank not in self._client.living_ranks
            if not is_dead:
                logger.exception("group %s is lost", route.group_id)
            await self._lose(route.group_id, RankDied.of(route.rank) if is_dead else error)
            return Move("lost", str(error))
        return move

    async def _lose(self, group_id: str, error: Exception) -> None:
        """End a group whose candidates may be in any engine core or none: abort and fail all of them."""
        client = self._client
        request_ids = [id for id in client.output_processor.request_states if client.group_of(id) == group_id]
        await client.engine_core.abort_requests_async(request_ids)
        client.lose(request_ids, error)

    async def _release(self, rank: int, wanted: GroupToRelease) -> Released:
        for _ in range(RELEASE_TRIES):
            released = await self._calls.call_rank(rank, RELEASE_GROUP, wanted)
            if released.outcome not in ("in_flight", "busy"):
                break
        return released


@asynccontextmanager
async def in_motion(route: GroupRoute) -> AsyncIterator[None]:
    """Hold a group's messages during a move. Messages under way arrive first, later ones wait."""
    assert route.door.is_open, f"group {route.group_id} moves already"
    route.door.shut()
    try:
        await route.door.left_by_all()
        yield
    finally:
        route.door.open()


def _last_one(rank: int, why: str) -> RequestError:
    return RequestError(
        f"rank {rank} cannot be drained: no other rank would take its groups. {why}",
        status=HTTPStatus.CONFLICT,
        param="rank",
    )


def _why_last(states: Sequence[RankState], rank: int) -> str:
    """Reason why no other rank takes groups, with the remedy."""
    others = [other for other in range(len(states)) if other != rank]
    dead = [other for other in others if states[other].is_dead]
    if dead and dead == others:
        return f"It is the last one that lives: the others ({dead}) have died. Restart the server."
    only = "It is the last one that is not drained." if others else "It is the only one."
    died = f" ({dead} have died)" if dead else ""
    return f"{only} Restore another one first{died}, or start the server with more --data-parallel-size."


def _send_to(core: DPLBAsyncMPClient, rank: int, request_ids: Iterable[str]) -> None:
    """Send later messages about these requests to another rank."""
    target = core.core_engines[rank]
    for request_id in request_ids:
        before = core.reqs_in_flight.get(request_id)
        if before is None:  # it has just ended on this side
            continue
        core.reqs_in_flight[request_id] = target
        core.engine_inflight[before] -= 1
        core.engine_inflight[target] += 1

"""Which groups of this API process move by themselves, and which ranks could be freed: `group/migration.py` and
`group/scaling.py` asked with what the engine cores say.

Invariant: a group moves without a drain only for what its request allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from vllm.logger import init_logger

from vllm_rollout.adapter.api.client import RolloutAsyncLLM
from vllm_rollout.adapter.api.group_routes import GroupRoute
from vllm_rollout.adapter.api.moving import EngineMoves
from vllm_rollout.adapter.api.shaping import EngineShaping
from vllm_rollout.adapter.options import RolloutOptions
from vllm_rollout.group.fields import Migration
from vllm_rollout.group.load import EngineLoad, GroupLoad, RankLoad
from vllm_rollout.group.migration import (
    PlannedMove,
    is_look_due,
    plan_consolidation,
    plan_drain,
    plan_spread,
)
from vllm_rollout.group.moments import LengthMoments
from vllm_rollout.group.scaling import Progress, ScaleDown, plan_scale_down
from vllm_rollout.server.engine import RequestError

logger = init_logger("vllm.vllm_rollout")

LOOK_S = 0.05
"""Between two counts of what has ended, while groups run that may move."""


class EngineMigration(EngineShaping, EngineMoves):
    """The part of `server.engine.Engine` that decides where groups run. Overrides: _drain_targets."""

    def __init__(self, client: RolloutAsyncLLM) -> None:
        super().__init__(client)
        self._planning: asyncio.Task[None] | None = None

    def move_refusal(self, *, priced: bool) -> str | None:
        if self._client.num_api_processes > 1:
            return (
                f"needs one API process, which knows all groups; this server has {self._client.num_api_processes}. "
                "Start it with --api-server-count 1."
            )
        if RolloutOptions.of(self._client.vllm_config).beside_rust:
            return (
                "needs an API process that knows all groups, and vLLM's Rust front end starts others. Start the server "
                "without VLLM_USE_RUST_FRONTEND=1."
            )
        if priced and self.cost_model is None:
            return (
                "needs to know what a step and a prefill cost. Start the server with --rollout-profile FILE "
                "(`vllm-rollout profile` writes one)."
            )
        return None

    def let_migrate(self) -> None:
        """Groups begin that may move: plan moves as long as there are some."""
        if self._planning is None or self._planning.done():
            self._planning = asyncio.create_task(self._plan_on())

    async def plan_scale_down(self, progress: Progress) -> ScaleDown:
        return plan_scale_down(progress, await self._all_loads())

    async def _drain_targets(self, rank: int) -> Mapping[str, int]:
        loads = await self._all_loads()
        return {move.group_id: move.target for move in plan_drain(loads, rank)}

    async def _plan_on(self) -> None:
        routes = self._client.routes
        num_left_at_look, delay = 0, 0.0
        while not self._client.errored:
            await asyncio.sleep(LOOK_S)
            num_left = sum(route.num_left for route in routes.movable)
            if not num_left:
                return
            if num_left > num_left_at_look:  # more have begun
                num_left_at_look, delay = num_left, 0.0
            if not is_look_due(num_left, num_left_at_look):
                continue
            num_left_at_look = num_left
            try:
                moves, delay = await self._next_moves(delay)
                for move in moves:
                    await self.move_group(move.group_id, move.target)
            except RequestError:  # a dead engine: whoever waits for its answers hears of it
                return
            except Exception:
                logger.exception("groups stay where they are: planning moves failed")

    async def _next_moves(self, delay: float) -> tuple[Sequence[PlannedMove], float]:
        """And by how much the consolidations of this tail make its end later (`Consolidation.delay`)."""
        lengths, seen = await self._dataset_lengths(), await self.engine_loads()
        loads = self._rank_loads(seen, lengths, lambda route: _moves_for(route, "spread"))
        if spread := plan_spread(self.cost_model, loads):
            return spread, delay
        loads = self._rank_loads(seen, lengths, lambda route: _moves_for(route, "consolidate"))
        consolidation = plan_consolidation(self.cost_model, loads, delay)
        return consolidation.moves, consolidation.delay

    async def _all_loads(self) -> list[RankLoad]:
        """As if all groups of this API process may move."""
        lengths = await self._dataset_lengths()
        return self._rank_loads(await self.engine_loads(), lengths, lambda route: True)

    async def _dataset_lengths(self) -> LengthMoments | None:
        """They predict groups without an outlook."""
        return (await self.length_history([])).dataset

    def _rank_loads(
        self, loads: Sequence[EngineLoad], lengths: LengthMoments | None, may_move: Callable[[GroupRoute], bool]
    ) -> list[RankLoad]:
        """What the rules know of each rank; groups that may not move are requests like others."""
        return [self._rank_load(rank, load, lengths, may_move) for rank, load in enumerate(loads)]

    def _rank_load(
        self, rank: int, load: EngineLoad, lengths: LengthMoments | None, may_move: Callable[[GroupRoute], bool]
    ) -> RankLoad:
        groups, other_tokens = [], 0
        for running in load.groups:
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
            other_requests=load.num_running + load.num_waiting - sum(group.num_candidates for group in groups),
            other_kv_tokens=other_tokens,
            kv_capacity_tokens=self._client.vllm_config.cache_config.kv_cache_size_tokens,
            max_num_seqs=self._client.vllm_config.scheduler_config.max_num_seqs,
            is_held=load.is_held,
            transfer=load.kv.transfer,
        )


def _moves_for(route: GroupRoute, purpose: Migration) -> bool:
    return route.migration in (purpose, "auto")

"""Migration of groups of this API process, planned by `parts/moving/rules/migration.py` from the engine cores' loads.

Invariant: a group moves without a drain only for reasons that its request allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from vllm.logger import init_logger

from vllm_rollout.background import spawn, survived
from vllm_rollout.kernel.api.client import RolloutAsyncLLM
from vllm_rollout.kernel.api.group_routes import GroupRoute
from vllm_rollout.kernel.http.engine import EngineStopped
from vllm_rollout.parts.moving.api.moving import EngineMoves
from vllm_rollout.parts.moving.http.fields import Migration, MovingOutlook
from vllm_rollout.parts.moving.rules.migration import PlannedMove, is_look_due, plan_consolidation, plan_spread
from vllm_rollout.parts.shaping.api.lengths import EngineShaping

logger = init_logger("vllm.vllm_rollout")

LOOK_S = 0.05
"""Seconds between two counts of ended candidates, while groups run that may move."""


def migration_of(route: GroupRoute) -> Migration:
    """Reasons for which the group may move without a drain."""
    return route.outlook.migration if isinstance(route.outlook, MovingOutlook) else "off"


class MigrationWatch:
    """Watches running groups that may move, and moves them if that pays."""

    def __init__(self, client: RolloutAsyncLLM, moves: EngineMoves, shaping: EngineShaping) -> None:
        self._client = client
        self._moves = moves
        self._shaping = shaping
        self._planning: asyncio.Task[None] | None = None

    def let_migrate(self) -> None:
        """Plan moves as long as groups run that may move. Call this when such a group begins."""
        if self._planning is None or self._planning.done():
            self._planning = spawn(self._plan_on(), "planning moves")

    async def _plan_on(self) -> None:
        routes = self._client.routes
        num_left_at_look, delay = 0, 0.0
        while not self._client.errored:
            await asyncio.sleep(LOOK_S)
            may_move = [route for route in routes.running if migration_of(route) != "off"]
            num_left = sum(route.placed.num_left for route in may_move if route.placed is not None)
            if not num_left:
                return
            if num_left > num_left_at_look:  # more have begun
                num_left_at_look, delay = num_left, 0.0
            if not is_look_due(num_left, num_left_at_look):
                continue
            num_left_at_look = num_left
            with survived("planning moves"), suppress(EngineStopped):  # a dead engine is reported elsewhere
                moves, delay = await self._next_moves(delay)
                for move in moves:
                    await self._moves.move_group(move.group_id, move.target)

    async def _next_moves(self, delay: float) -> tuple[Sequence[PlannedMove], float]:
        """The next moves, and how much this tail's consolidations delay its end so far (`Consolidation.delay`)."""
        cost, loads = self._shaping.cost_model, await self._moves.rank_loads()
        assert cost is not None, "without costs nothing watches"
        if spread := plan_spread(cost, loads(lambda route: migration_of(route) in ("spread", "auto"))):
            return spread, delay
        may_consolidate = loads(lambda route: migration_of(route) in ("consolidate", "auto"))
        consolidation = plan_consolidation(cost, may_consolidate, delay)
        return consolidation.moves, consolidation.delay

"""The part in the API process: moves of groups, by request and by plan."""

from __future__ import annotations

from argparse import Namespace

from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.kernel.http.engine import GroupOrder
from vllm_rollout.parts.moving.api.migration import MigrationWatch
from vllm_rollout.parts.moving.api.moving import EngineMoves
from vllm_rollout.parts.moving.http.fields import MovingOutlook
from vllm_rollout.parts.moving.rules.placement import PredictedRanks
from vllm_rollout.parts.moving.rules.work import TokenCost
from vllm_rollout.parts.shaping.api.lengths import EngineShaping
from vllm_rollout.parts.shaping.rules.cost import CostModel


class MovingApi(EngineMoves):
    """Overrides: start, group_begins."""

    def __init__(self, engine: VLLMEngine) -> None:
        shaping = engine.part(EngineShaping)
        super().__init__(engine.client, engine.calls, shaping)
        shaping.when_weighed.append(self.weigh)
        self._migration = MigrationWatch(engine.client, self, shaping)

    def weigh(self, cost: CostModel) -> None:
        """Compare the work of ranks by this cost from now on."""
        if isinstance(ranks := self._client.routes.ranks, PredictedRanks):
            ranks.token_cost = TokenCost.of(cost)

    async def start(self, settings: Namespace) -> None:
        self.follow_holds()

    def group_begins(self, order: GroupOrder) -> None:
        if isinstance(order.outlook, MovingOutlook) and order.outlook.migration != "off":
            self._migration.let_migrate()

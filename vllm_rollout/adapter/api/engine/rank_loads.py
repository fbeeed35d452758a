"""What the engine cores say of their load, and what the rules of moving know of each rank."""

from __future__ import annotations

from collections.abc import Callable

from vllm_rollout.adapter.api.calls.engine_calls import EngineCalls
from vllm_rollout.adapter.api.client.client import RolloutAsyncLLM
from vllm_rollout.adapter.api.client.group_routes import GroupRoute
from vllm_rollout.adapter.api.engine.shaping import EngineShaping
from vllm_rollout.adapter.call_table import ENGINE_LOAD
from vllm_rollout.group.lengths.moments import LengthMoments
from vllm_rollout.group.ranks.load import DEAD_LOAD, EngineLoad, GroupLoad, RankLoad

MayMove = Callable[[GroupRoute], bool]


class RankLoads:
    """The loads of one engine's ranks."""

    def __init__(self, client: RolloutAsyncLLM, calls: EngineCalls, shaping: EngineShaping) -> None:
        self._client = client
        self._calls = calls
        self._shaping = shaping

    async def seen(self) -> list[EngineLoad]:
        """By rank. Raises: RequestError (503) for a dead engine."""
        loads = await self._calls.call_each(ENGINE_LOAD, None)
        return [loads.get(rank, DEAD_LOAD) for rank in range(self._calls.num_ranks)]

    async def as_if_all_may_move(self) -> list[RankLoad]:
        """What the rules know of each rank, where all groups of this API process may move."""
        return (await self.look())(lambda route: True)

    async def look(self) -> Callable[[MayMove], list[RankLoad]]:
        """Ask once; what is returned says what the rules know of each rank, given which groups may move."""
        lengths = (await self._shaping.length_history([])).dataset  # they predict groups without an outlook
        loads = await self.seen()
        return lambda may_move: [self._rank_load(rank, load, lengths, may_move) for rank, load in enumerate(loads)]

    def _rank_load(self, rank: int, load: EngineLoad, lengths: LengthMoments | None, may_move: MayMove) -> RankLoad:
        """Groups that may not move are requests like others."""
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

"""Ranks of the fake engine."""

from __future__ import annotations

from collections import defaultdict
from http import HTTPStatus

from tests.kernel.http.fake_engine import FakeEngine, FakePart
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.parts.moving.http.engine import Drained, MovesPart
from vllm_rollout.parts.moving.rules.load import ArrivedKV, EngineLoad, GroupLoad, RankLoad, RankState
from vllm_rollout.parts.moving.rules.placement import ALL_OWNERS, TRAINER, Holders
from vllm_rollout.parts.moving.rules.scaling import Progress, ScaleDown, plan_scale_down


class FakeMoves(FakePart, MovesPart):
    """Everything runs on the first rank that is not held."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self.holders: defaultdict[int, Holders] = defaultdict(Holders)
        """Holders of each rank."""
        self.arrived: dict[int, tuple[float, ArrivedKV]] = {}
        """By rank: seconds spent on moves, and the KV that came along."""

    @property
    def held(self) -> set[int]:
        return {rank for rank, holders in self.holders.items() if holders}

    def refusal(self, *, priced: bool) -> str | None:
        return None if self.engine.num_ranks > 1 else "needs several ranks."

    async def rank_states(self) -> list[RankState]:
        busy = min(set(range(self.engine.num_ranks)) - self.held)
        return [
            RankState(
                EngineLoad(self.engine.num_running if rank == busy else 0, 0, 0.0, 0, []),
                rank in self.held,
                0,
                0,
                *self.arrived.get(rank, ()),
            )
            for rank in range(self.engine.num_ranks)
        ]

    async def drain(self, rank: int, timeout_s: float, owner: str = TRAINER) -> Drained:
        if self.held | {rank} == set(range(self.engine.num_ranks)):
            raise RequestError("the last one", status=HTTPStatus.CONFLICT, param="rank")
        self.holders[rank].change(owner, held=True)
        its = (await self.rank_states())[rank]
        return Drained(its.is_held, 0, its.num_requests, {}, 0.0)

    async def restore(self, rank: int, owner: str = ALL_OWNERS) -> None:
        self.holders[rank].change(owner, held=False)

    async def plan_scale_down(self, progress: Progress) -> ScaleDown:
        groups = [GroupLoad.of(id, 10, [5], None, 100) for id in self.engine.groups]
        loads = [
            RankLoad(rank, tuple(groups[rank :: self.engine.num_ranks]), is_held=rank in self.held)
            for rank in range(self.engine.num_ranks)
        ]
        return plan_scale_down(progress, loads)


FAKE = FakeMoves

"""The parts of the fake engine that shape rollouts and move groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from tests.parts.pruning.fake_learning import FakeLearning
from tests.support.steps import lengths_of
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.rules.step import GroupSteps
from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.parts.moving.http.engine import Drained, MovesPart
from vllm_rollout.parts.moving.rules.load import ArrivedKV, EngineLoad, GroupLoad, RankLoad, RankState
from vllm_rollout.parts.moving.rules.placement import ALL_OWNERS, TRAINER, Holders
from vllm_rollout.parts.moving.rules.scaling import Progress, ScaleDown, plan_scale_down
from vllm_rollout.parts.shaping.http.engine import ShapingPart
from vllm_rollout.parts.shaping.rules.cost import CostModel
from vllm_rollout.parts.shaping.rules.drift import StepDrift
from vllm_rollout.parts.shaping.rules.history import ObservedLength
from vllm_rollout.parts.shaping.rules.moments import LengthStatistics


@dataclass(slots=True)
class FakeShaping(ShapingPart):
    """Lengths are part of what is learned."""

    learning: FakeLearning
    cost_model: CostModel | None = None
    drift: Sequence[StepDrift] = ()

    async def observe_lengths(self, key: str, lengths: Sequence[ObservedLength], adapter: str = BASE_MODEL) -> None:
        self.learning.check_alive()
        memory = self.learning.judge.memories.of(adapter)
        if memory is not None:
            lengths_of(memory).observe(key, lengths)

    async def length_history(self, keys: Sequence[str], adapter: str = BASE_MODEL) -> LengthStatistics:
        self.learning.check_alive()
        return lengths_of(self.learning.memory(adapter)).statistics(keys)

    async def step_drift(self) -> Sequence[StepDrift]:
        return self.drift


@dataclass(slots=True)
class FakeMoves(MovesPart):
    """Everything runs on rank 0."""

    groups: Mapping[str, GroupSteps] = field(default_factory=dict)
    """Running groups by id."""
    count_running: Callable[[], int] = lambda: 0
    """Counts running candidates."""
    num_ranks: int = 1
    holders: defaultdict[int, Holders] = field(default_factory=lambda: defaultdict(Holders))
    """Holders of each rank."""
    arrived: dict[int, tuple[float, ArrivedKV]] = field(default_factory=dict)
    """By rank: seconds spent on moves, and the KV that came along."""

    @property
    def held(self) -> set[int]:
        return {rank for rank, holders in self.holders.items() if holders}

    def refusal(self, *, priced: bool) -> str | None:
        return None if self.num_ranks > 1 else "needs several ranks."

    async def rank_states(self) -> list[RankState]:
        return [
            RankState(
                EngineLoad(0 if rank else self.count_running(), 0, 0.0, 0, []),
                rank in self.held,
                0,
                0,
                *self.arrived.get(rank, ()),
            )
            for rank in range(self.num_ranks)
        ]

    async def drain(self, rank: int, timeout_s: float, owner: str = TRAINER) -> Drained:
        if self.held | {rank} == set(range(self.num_ranks)):
            raise RequestError("the last one", status=HTTPStatus.CONFLICT, param="rank")
        self.holders[rank].change(owner, held=True)
        its = (await self.rank_states())[rank]
        return Drained(its.is_held, 0, its.num_requests, {}, 0.0)

    async def restore(self, rank: int, owner: str = ALL_OWNERS) -> None:
        self.holders[rank].change(owner, held=False)

    async def plan_scale_down(self, progress: Progress) -> ScaleDown:
        groups = [GroupLoad.of(id, 10, [5] * steps.held.num_running, None, 100) for id, steps in self.groups.items()]
        loads = [
            RankLoad(rank, tuple(groups[rank :: self.num_ranks]), is_held=rank in self.held)
            for rank in range(self.num_ranks)
        ]
        return plan_scale_down(progress, loads)

"""Lengths and costs of the fake engine."""

from __future__ import annotations

from collections.abc import Sequence

from tests.kernel.http.fake_engine import FakePart
from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.parts.shaping.http.engine import ShapingPart
from vllm_rollout.parts.shaping.rules.cost import CostModel
from vllm_rollout.parts.shaping.rules.drift import StepDrift
from vllm_rollout.parts.shaping.rules.history import LENGTHS, ObservedLength
from vllm_rollout.parts.shaping.rules.moments import LengthStatistics


class FakeShaping(FakePart, ShapingPart):
    """Lengths are part of what is learned."""

    cost_model: CostModel | None = None
    drift: Sequence[StepDrift] = ()

    async def observe_lengths(self, key: str, lengths: Sequence[ObservedLength], adapter: str = BASE_MODEL) -> None:
        self.engine.check_alive()
        memory = self.engine.memories.of(adapter)
        if memory is not None:
            LENGTHS.of(memory).observe(key, lengths)

    async def length_history(self, keys: Sequence[str], adapter: str = BASE_MODEL) -> LengthStatistics:
        self.engine.check_alive()
        memory = self.engine.memories.known(adapter) or self.engine.memories.new()
        return LENGTHS.of(memory).statistics(keys)

    async def step_drift(self) -> Sequence[StepDrift]:
        return self.drift


FAKE = FakeShaping

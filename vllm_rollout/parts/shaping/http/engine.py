"""The part of an engine that knows lengths and costs, as services see it."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_rollout.kernel.http.ports import ApiPart
from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.parts.shaping.rules.cost import CostModel
from vllm_rollout.parts.shaping.rules.drift import StepDrift
from vllm_rollout.parts.shaping.rules.history import ObservedLength
from vllm_rollout.parts.shaping.rules.moments import LengthStatistics


class ShapingPart(ApiPart):
    """The part of an engine that knows lengths and the cost of steps."""

    @property
    def cost_model(self) -> CostModel | None:
        """The cost of a step on this engine. None without a profile."""
        raise NotImplementedError

    async def observe_lengths(self, key: str, lengths: Sequence[ObservedLength], adapter: str = BASE_MODEL) -> None:
        """Record the lengths of a finished group of a prompt. Raises: EngineStopped."""
        raise NotImplementedError

    async def length_history(self, keys: Sequence[str], adapter: str = BASE_MODEL) -> LengthStatistics:
        """Known lengths of these prompts under an adapter. Raises: EngineStopped."""
        raise NotImplementedError

    async def step_drift(self) -> Sequence[StepDrift]:
        """Live step times against the profile's, as far as there are any. With several ranks: of the rank that is
        furthest off."""
        raise NotImplementedError

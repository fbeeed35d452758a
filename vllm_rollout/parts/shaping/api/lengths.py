"""The part of the service's engine that knows the history of lengths and the costs of steps.

Invariant: every rank that this API process can reach gets the same data.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vllm.logger import init_logger

from vllm_rollout.kernel.api.client import RolloutAsyncLLM
from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.kernel.api.engine_calls import EngineCalls
from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.parts.shaping.api.fingerprint import engine_flags, fingerprint_of, hardware_of
from vllm_rollout.parts.shaping.calls import (
    LENGTH_HISTORY,
    OBSERVE_LENGTHS,
    SET_COST_MODEL,
    STEP_DRIFT,
    CostToCompare,
    LengthsToLookUp,
    ObservedGroup,
)
from vllm_rollout.parts.shaping.http.engine import ShapingPart
from vllm_rollout.parts.shaping.profile_file import Profile
from vllm_rollout.parts.shaping.rules.cost import CostModel
from vllm_rollout.parts.shaping.rules.drift import StepDrift
from vllm_rollout.parts.shaping.rules.history import ObservedLength
from vllm_rollout.parts.shaping.rules.moments import LengthMoments, LengthStatistics

logger = init_logger("vllm.vllm_rollout")

KEYS_PER_CALL = 512
"""Prompts whose lengths are asked for in one message to an engine core."""


def emulated_device(flags: Namespace) -> Any | None:
    """The device of the flags that is not real, and so knows what its steps cost. None if there is none."""
    return next((device for _, device_of in faces("device") if (device := device_of(flags)) is not None), None)


class EngineShaping(ShapingPart):
    """Overrides: start."""

    cost_model: CostModel | None = None

    def __init__(self, client: RolloutAsyncLLM, calls: EngineCalls) -> None:
        self._client = client
        self._calls = calls
        self.when_weighed: list[Callable[[CostModel], None]] = []
        """Functions of other parts that are called with each new cost model."""

    async def start(self, settings: Namespace) -> None:
        await self.use_costs(settings)

    async def use_costs(self, settings: Namespace) -> None:
        """Use the costs of the profile that the flags name, or of the device that they name."""
        if settings.rollout_profile is not None:
            await self.use_profile(settings.rollout_profile)
            return
        if (device := emulated_device(settings)) is not None:
            self._weigh(device.cost(self._client.vllm_config.parallel_config.tensor_parallel_size))

    def _weigh(self, cost: CostModel) -> CostModel:
        weighed = self.cost_model = replace(cost, max_num_seqs=self._client.max_candidates)
        for hear in self.when_weighed:
            hear(weighed)
        return weighed

    async def use_profile(self, path: str) -> None:
        """Take a step's cost from a profile, and let engine cores compare real steps with it.

        Raises: RuntimeError, which ends the start, for a file that is no profile or one of another model.
        """
        config = self._client.vllm_config
        tensor_parallel_size = config.parallel_config.tensor_parallel_size
        try:
            profile = Profile.read(path)
            mismatch = profile.mismatch(fingerprint_of(config), hardware_of(config), engine_flags(config))
            if mismatch.error is not None:
                raise ValueError(mismatch.error)
            cost = self._weigh(profile.cost(tensor_parallel_size))
        except ValueError as error:
            raise RuntimeError(f"--rollout-profile {path}: {error}") from error
        if mismatch.warning is not None:
            logger.warning("vllm_rollout: --rollout-profile %s: %s", path, mismatch.warning)
        name, sizes = profile.model_name, profile.batch_sizes(tensor_parallel_size)
        await self._calls.call_all(SET_COST_MODEL, CostToCompare(cost, name, path, sizes))
        logger.info("vllm_rollout: steps cost what %s says (%s, %d batch sizes)", path, name, len(sizes))

    async def observe_lengths(self, key: str, lengths: Sequence[ObservedLength], adapter: str = BASE_MODEL) -> None:
        await self._calls.call_all(OBSERVE_LENGTHS, ObservedGroup(key, list(lengths), adapter))
        self._calls.after_change()

    async def length_history(self, keys: Sequence[str], adapter: str = BASE_MODEL) -> LengthStatistics:
        """Length statistics from one rank, because every rank gets the same lengths."""
        known: list[LengthMoments | None] = []
        for start in range(0, max(1, len(keys)), KEYS_PER_CALL):
            wanted = LengthsToLookUp(list(keys[start : start + KEYS_PER_CALL]), adapter)
            history = await self._calls.call_first(LENGTH_HISTORY, wanted)
            known += history.prompts
        return replace(history, prompts=known)

    async def step_drift(self) -> list[StepDrift]:
        """For each range of batch sizes, the drift of the rank that is furthest from its prediction."""
        if self.cost_model is None:
            return []
        ranges: dict[int, StepDrift] = {}
        for rank in await self._calls.call_all(STEP_DRIFT, None):
            for found in rank:
                other = ranges.get(found.smallest)
                if other is None or found.distance > other.distance:
                    ranges[found.smallest] = found
        return list(ranges.values())


def part(engine: VLLMEngine) -> EngineShaping:
    return EngineShaping(engine.client, engine.calls)

"""The shaping half of the service's engine: the history of lengths and what steps cost.

Invariant: every rank this API process can reach is told the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm.logger import init_logger

from vllm_rollout.adapter.api.engine_calls import EngineCalls
from vllm_rollout.adapter.api.fingerprint import engine_flags, fingerprint_of, hardware_of
from vllm_rollout.adapter.core.step_times import plain_cost_model
from vllm_rollout.group.cost import CostModel
from vllm_rollout.group.history import LengthMoments, ObservedLength
from vllm_rollout.profiling.profile_file import Profile
from vllm_rollout.server.engine import LengthStatistics, StepDrift

logger = init_logger("vllm.vllm_rollout")


class EngineShaping(EngineCalls):
    """The part of `server.engine.Engine` that knows lengths and costs."""

    cost_model: CostModel | None = None

    @property
    def num_ranks(self) -> int:
        return self._client.num_ranks

    async def use_profile(self, path: str) -> None:
        """Take a step's cost from a profile, and have live steps compared with it.

        Raises: RuntimeError, which ends the start, for a file that is no profile or one of another model.
        """
        config = self._client.vllm_config
        tensor_parallel_size = config.parallel_config.tensor_parallel_size
        try:
            profile = Profile.read(path)
            mismatch = profile.mismatch(fingerprint_of(config), hardware_of(config), engine_flags(config))
            if mismatch.error is not None:
                raise ValueError(mismatch.error)
            self.cost_model = replace(profile.cost(tensor_parallel_size), max_num_seqs=self._client.max_candidates)
        except ValueError as error:
            raise RuntimeError(f"--rollout-profile {path}: {error}") from error
        if mismatch.warning is not None:
            logger.warning("vllm_rollout: --rollout-profile %s: %s", path, mismatch.warning)
        name, sizes = profile.model_name, profile.batch_sizes(tensor_parallel_size)
        await self._call("set_cost_model", plain_cost_model(self.cost_model), name, path, sizes)
        logger.info("vllm_rollout: steps cost what %s says (%s, %d batch sizes)", path, name, len(sizes))

    async def observe_lengths(self, key: str, lengths: Sequence[ObservedLength]) -> None:
        await self._call("observe_lengths", key, [list(length) for length in lengths])
        self.after_change()

    async def length_history(self, keys: Sequence[str]) -> LengthStatistics:
        (dataset, prompts), *_ = await self._call("length_history", list(keys))
        return LengthStatistics(_moments(dataset), [_moments(values) for values in prompts])

    async def step_drift(self) -> list[StepDrift]:
        """Of each range of batch sizes the rank that is furthest from its prediction."""
        if self.cost_model is None:
            return []
        ranges: dict[int, StepDrift] = {}
        for rank in await self._call("step_drift"):
            for found in (StepDrift(*values) for values in rank):
                other = ranges.get(found.smallest)
                if other is None or found.distance > other.distance:
                    ranges[found.smallest] = found
        return list(ranges.values())


def _moments(values: Sequence[float] | None) -> LengthMoments | None:
    return None if values is None else LengthMoments(*values)

"""`vllm_rollout.AsyncLLM`: vLLM's AsyncLLM of a trainer's own process, with groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import utils

from vllm_rollout.adapter.plugin import replace_engine_client
from vllm_rollout.kernel.api.client import RolloutAsyncLLM
from vllm_rollout.kernel.client import calls
from vllm_rollout.kernel.parts import faces
from vllm_rollout.parts.in_process.api.engine_args import UninterruptedProcesses, with_groups
from vllm_rollout.parts.in_process.api.methods import async_streamed, awaited
from vllm_rollout.parts.in_process.api.rollouts import Rewards, Rollouts
from vllm_rollout.parts.in_process.api.runs import with_spares

if TYPE_CHECKING:
    from vllm_rollout import AsyncLLMMethods
else:
    AsyncLLMMethods = type("AsyncLLMMethods", tuple(methods for _, methods in faces("async_llm")), {})


class AsyncLLM(AsyncLLMMethods, RolloutAsyncLLM):
    """AsyncLLM with `rollout`, `stream`, `post_rewards` and related methods. Build it by `from_engine_args`.

    `generate` runs a group if `extra_args` has `rollout_*` fields: `n` outputs, of `n + rollout_redundancy` candidates.

    Overrides: __init__, generate, from_engine_args.
    """

    rollout = awaited(calls.rollout)
    stream = async_streamed(calls.stream)
    post_rewards = awaited(calls.post_rewards)
    post_named_rewards = awaited(calls.post_named_rewards)

    fields_in = "extra_args"
    spares = 0
    """Spare candidates of requests with `n` that have no group fields."""
    group_size: int | None = None
    """Size of groups that get spare candidates. None: any size."""
    chat_template: str | None = None
    """Chat template in place of the model's own."""
    rollout_profile: str | None = None
    """A file of `vllm-rollout profile`, with step costs for redundancy "auto". Set it before the first rollout."""
    rollout_record: str | None = None
    """A file for `vllm-rollout simulate`: one line per rollout. Set it before the first rollout."""
    rollout_rewards: Rewards | None = None
    """Reward functions by the names that rollouts use. Set it before the first rollout."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # As the plugin does in a server's processes: vLLM looks these names up when it builds the engine.
        replace_engine_client()
        utils.CoreEngineProcManager = UninterruptedProcesses  # type: ignore[misc]
        super().__init__(*args, **kwargs)
        self._opening = asyncio.Lock()
        self._rollouts: Rollouts | None = None

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        if self.spares and isinstance(sampling_params, SamplingParams):
            sampling_params = with_spares(sampling_params, self.spares, self.group_size, self.max_candidates)
        return super().generate(prompt, sampling_params, request_id, **kwargs)

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs, *args: Any, **kwargs: Any) -> AsyncLLM:
        return super().from_engine_args(with_groups(engine_args), *args, **kwargs)  # type: ignore[return-value]

    async def rollouts(self) -> Rollouts:
        """The service of this engine, created by the first call."""
        async with self._opening:
            if self._rollouts is None:
                self._rollouts = await Rollouts.around(
                    self,
                    chat_template=self.chat_template,
                    profile=self.rollout_profile,
                    record=self.rollout_record,
                    rewards=self.rollout_rewards,
                )
        return self._rollouts

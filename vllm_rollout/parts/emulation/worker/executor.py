"""The executor of an emulated device, in the engine core's own process. It restores the step loop that the user asked
for.

vLLM's CPU platform switches asynchronous scheduling off when the settings are checked. The executor is made before the
scheduler, and before the engine core chooses its loop, so it can set the original value.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_rollout.parts.emulation.options import EmulationOptions


def is_asynchronous(config: VllmConfig) -> bool:
    """The user's setting. With drafts vLLM schedules synchronously."""
    return EmulationOptions.of(config).async_scheduling and config.speculative_config is None


class EmulatedExecutor(UniProcExecutor):
    """Executor with the original setting of asynchronous scheduling. Overrides: _init_executor."""

    def _init_executor(self) -> None:
        self.scheduler_config.async_scheduling = is_asynchronous(self.vllm_config)
        super()._init_executor()

"""The executor of an emulated device, in the engine core's own process. It restores the step loop that the user asked
for.

vLLM's CPU platform switches asynchronous scheduling off when the settings are checked. The executor is made before the
scheduler, and before the engine core chooses its loop, so it can set the original value.
"""

from __future__ import annotations

from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_rollout.parts.emulation.options import EmulationOptions


class EmulatedExecutor(UniProcExecutor):
    """Executor with the original setting of asynchronous scheduling. Overrides: _init_executor."""

    def _init_executor(self) -> None:
        is_wanted = EmulationOptions.of(self.vllm_config).async_scheduling
        # With drafts vLLM schedules synchronously.
        self.scheduler_config.async_scheduling = is_wanted and self.vllm_config.speculative_config is None
        super()._init_executor()

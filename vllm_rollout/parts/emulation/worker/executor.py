"""The executor of an emulated device, in the engine core's own process. It restores the step loop that the user asked
for.

vLLM's CPU platform switches asynchronous scheduling off when the settings are checked. The executor is made before the
scheduler, and before the engine core chooses its loop, so it can set the original value.
"""

from __future__ import annotations

from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_rollout.kernel.options import ServeOptions


class EmulatedExecutor(UniProcExecutor):
    """Executor with the original setting of asynchronous scheduling. Overrides: _init_executor."""

    def _init_executor(self) -> None:
        emulation = ServeOptions.of(self.vllm_config).emulation
        assert emulation is not None, "an emulated device has its settings"
        self.scheduler_config.async_scheduling = emulation.async_scheduling
        super()._init_executor()

"""The worker that `--worker-cls` names: the platform's own, with an observed model runner."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_rollout.adapter.runner import observe_runner
from vllm_rollout.tracker.ops import active_implementation

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

logger = init_logger("vllm.vllm_rollout")


class RolloutWorker(PlatformWorker):
    """Overrides: init_device. `worker_extension_cls` stays free for the trainer."""

    def init_device(self, *args: Any, **kwargs: Any) -> None:
        super().init_device(*args, **kwargs)
        observe_runner(self.model_runner, v2=self.use_v2_model_runner, cpu=current_platform.is_cpu())
        implementation = active_implementation(self.device.type)
        logger.info_once(
            "vllm_rollout worker: model runner %s, token_stats: %s%s",
            "V2" if self.use_v2_model_runner else "V1",
            implementation.name,
            f" ({implementation.reason})" if implementation.reason else "",
        )

"""The worker for `--worker-cls`: the platform's own, with an observed model runner and the parts beside it."""

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_rollout.adapter.options import observing_refusal
from vllm_rollout.adapter.weights import Changes, listen
from vllm_rollout.kernel.tracker.dispatch import active_implementation, operators
from vllm_rollout.kernel.worker.ports import WorkerParts
from vllm_rollout.kernel.worker.runner import observe_runner
from vllm_rollout.kernel.worker.verification import mend_expansion
from vllm_rollout.kernel.worker.worker_calls import WorkerCalls

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker  # type: ignore[assignment]

logger = init_logger("vllm.vllm_rollout")


class RolloutWorker(WorkerCalls, PlatformWorker):
    """Overrides: init_device, load_model, reload_weights, update_weights, finish_weight_update.

    Adds the methods of `WorkerCalls`, for `collective_rpc`. `worker_extension_cls` stays free for the trainer.
    """

    def init_device(self, *args: Any, **kwargs: Any) -> None:
        super().init_device(*args, **kwargs)
        self.is_read = get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0
        refusal = observing_refusal(self.vllm_config)
        observe_runner(
            self.model_runner,
            self.is_read and refusal is None,
            v2=self.use_v2_model_runner,
            cpu=current_platform.is_cpu(),
        )
        if current_platform.is_cpu() and self.vllm_config.speculative_config is not None:
            mend_expansion()
        self.parts = WorkerParts.of(self)
        self.model_runner.join(self.parts)
        say_what_serves("V2" if self.use_v2_model_runner else "V1", self.device.type)
        if refusal is not None:
            logger.warning_once("vllm_rollout worker: candidates are not observed, because %s", refusal)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        listen(self.model_runner.get_model())

    # Weights may also come without the model's `load_weights`, copied by vLLM into place.

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        Changes.num += 1
        super().reload_weights(*args, **kwargs)

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        Changes.num += 1
        super().update_weights(*args, **kwargs)

    def finish_weight_update(self, *args: Any, **kwargs: Any) -> None:
        Changes.num += 1
        super().finish_weight_update(*args, **kwargs)


def say_what_serves(runner: str, device_type: str) -> None:
    """Log the model runner and each operator. It is a warning if a faster operator than the active one exists."""
    serving = {name: active_implementation(device_type, name) for name in operators()}
    described = [
        f"{name}: {active.name}" + (f" ({active.reason})" if active.reason else "") for name, active in serving.items()
    ]
    fastest = all(active.reason is None for active in serving.values())
    say = logger.info_once if fastest else logger.warning_once
    say("vllm_rollout worker: model runner %s, %s", runner, ", ".join(described))

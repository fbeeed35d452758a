"""The worker for `--worker-cls`: the platform's own, with an observed model runner and quality heads."""

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_rollout.adapter.options import observing_refusal
from vllm_rollout.adapter.weights import Changes, listen
from vllm_rollout.kernel.tracker.ops import active_implementation
from vllm_rollout.kernel.worker.ports import WorkerParts
from vllm_rollout.kernel.worker.runner import observe_runner
from vllm_rollout.kernel.worker.verification import mend_expansion
from vllm_rollout.kernel.worker.worker_calls import WorkerCalls
from vllm_rollout.parts.pruning.worker.feature_ring import FeatureRing
from vllm_rollout.parts.pruning.worker.quality_head import warm_up_training
from vllm_rollout.parts.pruning.worker.quality_heads import QualityHeads

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker  # type: ignore[assignment]

logger = init_logger("vllm.vllm_rollout")

STEP_OPERATORS = ("token_confidence", "update_confidence", "quality_head")
"""Operators of a step. The last one runs only if a candidate is due."""


class RolloutWorker(WorkerCalls, PlatformWorker):
    """Overrides: init_device, load_model, reload_weights, update_weights, finish_weight_update.

    Adds the methods of `WorkerCalls`, for `collective_rpc`. `worker_extension_cls` stays free for the trainer.
    """

    def init_device(self, *args: Any, **kwargs: Any) -> None:
        super().init_device(*args, **kwargs)
        self.quality_heads = ring = None
        hidden_size, dtype = self.model_config.get_hidden_size(), self.model_config.dtype
        self.is_read = get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0
        if self.is_read:
            ring = FeatureRing.of(self.vllm_config, hidden_size, dtype)  # type: ignore[arg-type]
        refusal = observing_refusal(self.vllm_config)
        seen_by = ring if refusal is None else None
        num_stages = self.vllm_config.parallel_config.pipeline_parallel_size
        num_in_flight = self.vllm_config.scheduler_config.async_scheduling + num_stages - 1  # type: ignore[operator]
        num_in_flight += self.vllm_config.num_speculative_tokens  # a step may make more than a candidate had left
        observe_runner(
            self.model_runner,
            seen_by,
            v2=self.use_v2_model_runner,
            cpu=current_platform.is_cpu(),
            num_in_flight=num_in_flight,
        )
        if current_platform.is_cpu() and self.vllm_config.speculative_config is not None:
            mend_expansion()
        self.parts = self.model_runner.parts = WorkerParts.of(self)
        say_what_serves("V2" if self.use_v2_model_runner else "V1", self.device.type)
        if refusal is not None:
            logger.warning_once("vllm_rollout worker: candidates are not observed, because %s", refusal)
        if ring is None:
            return
        warm_up_training()
        self.quality_heads = QualityHeads(
            self.model_runner.candidate_tracker,
            ring,
            hidden_size=hidden_size,
            model=self.model_config.served_model_name or self.model_config.model,  # type: ignore[arg-type]
            device=self.device,  # type: ignore[arg-type]
        )
        logger.info_once(
            "vllm_rollout worker: features of up to %d scored candidates (hidden size %d) wait for their rewards in "
            "at most %d MB of host memory, used as they come",
            ring.capacity,
            hidden_size,
            round(ring.capacity * hidden_size * dtype.itemsize / 2**20),
        )

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
    operators = {name: active_implementation(device_type, name) for name in STEP_OPERATORS}
    described = [
        f"{name}: {active.name}" + (f" ({active.reason})" if active.reason else "")
        for name, active in operators.items()
    ]
    fastest = all(active.reason is None for active in operators.values())
    say = logger.info_once if fastest else logger.warning_once
    say("vllm_rollout worker: model runner %s, %s", runner, ", ".join(described))

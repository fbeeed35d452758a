"""The worker for `--worker-cls`: the platform's own, with the parts beside its model runner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.platforms import current_platform

from vllm_rollout.adapter.verification import mend_expansion
from vllm_rollout.adapter.weights import Changes, keep_old, listen, num_without_memory
from vllm_rollout.kernel.worker.ports import WorkerParts
from vllm_rollout.kernel.worker.runner import extend_runner
from vllm_rollout.kernel.worker.worker_calls import WorkerCalls

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker  # type: ignore[assignment]


class RolloutWorker(WorkerCalls, PlatformWorker):
    """Overrides: init_device, load_model, reload_weights, update_weights, finish_weight_update.

    Adds the methods of `WorkerCalls`, for `collective_rpc`. `worker_extension_cls` stays free for the trainer.
    """

    def init_device(self, *args: Any, **kwargs: Any) -> None:
        super().init_device(*args, **kwargs)
        self.is_read = get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0
        extend_runner(self.model_runner, v2=self.use_v2_model_runner, cpu=current_platform.is_cpu())
        if current_platform.is_cpu() and self.vllm_config.speculative_config is not None:
            mend_expansion()
        self.parts = WorkerParts.of(self)
        self.model_runner.join(self.parts)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        listen(self.model_runner.get_model())
        self.num_without_memory = num_without_memory(self.models)

    @property
    def models(self) -> list[nn.Module]:
        """The served model, and the draft model if there is one."""
        return [each for each in (self.model_runner.get_model(), self.get_draft_model()) if each is not None]

    # Weights may also come without the model's `load_weights`, copied by vLLM into place.

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        with self._loading():
            super().reload_weights(*args, **kwargs)

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        with self._loading():
            super().update_weights(*args, **kwargs)

    def finish_weight_update(self, *args: Any, **kwargs: Any) -> None:
        with self._loading():
            super().finish_weight_update(*args, **kwargs)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Count a weights change. If the load fails, its models are whole, too. Raises: RuntimeError."""
        Changes.num += 1
        try:
            yield
        except Exception as error:
            with set_current_vllm_config(self.vllm_config):
                for model in self.models:
                    keep_old(model, self.vllm_config.model_config)
            raise RuntimeError(
                f"the weights were not loaded ({error!r}). Do they fit the served model? It has its weights of before, "
                "or a part of the new ones. Give it weights again."
            ) from error

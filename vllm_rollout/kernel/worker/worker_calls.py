"""Calls of an engine core to its worker, by `collective_rpc`. Parts add methods by their face `worker_calls`: a mixin.

Invariant: a method whose name begins with `rollout_` is called between two steps.
"""

from __future__ import annotations

from typing import Any

from vllm_rollout.adapter.weights import Changes, clean, num_without_memory
from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.worker.ports import WorkerPart, WorkerParts


class WorkerCalls(*(calls for _, calls in faces("worker_calls"))):  # type: ignore[misc]
    """The methods of a worker that begin with `rollout_`."""

    is_read = True
    """True for the worker whose outputs are read."""
    parts = WorkerParts()
    model_runner: Any
    """None on an emulated device."""
    models: list[Any]
    num_without_memory = 0
    """Weights that have no memory although the model is loaded, as in some quantized layers."""

    def rollout_num_changes(self) -> int:
        """Number of weights changes in this process."""
        return Changes.num

    def rollout_count_change(self) -> int:
        """Count a weights change that came by an uncounted way."""
        Changes.num += 1
        return Changes.num

    def rollout_lacks_weights(self) -> int:
        """1 while new weights are on their way, so that layers have no memory. A step would end the engine."""
        if self.model_runner is None:
            return 0
        return int(num_without_memory(self.models) > self.num_without_memory)

    def rollout_clean_kv(self) -> int:
        """Clean the KV cache of values that are not finite. Returns 1 if there were any."""
        if self.model_runner is None:
            return 0
        try:
            return int(clean(self.model_runner.kv_caches))
        except Exception as error:
            self.model_runner.faults.caught("cleaning KV", error)
            return 0

    def rollout_stop_parts(self) -> None:
        """Let parts keep what must outlive the server."""
        self.parts.call(WorkerPart.stop)

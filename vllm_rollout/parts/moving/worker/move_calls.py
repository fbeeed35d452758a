"""Calls of an engine core to its worker when a group leaves or comes."""

from __future__ import annotations

from typing import Any

from vllm_rollout.parts.moving.wire import MovedCandidate, WorkerState
from vllm_rollout.parts.moving.worker.candidates import attach, detach
from vllm_rollout.parts.moving.worker.kv_calls import KVCalls


class MoveCalls(KVCalls):
    """Methods of a worker."""

    is_read: bool
    moving_runner: Any = None
    """Takes the place of the model runner on an emulated device."""

    def rollout_detach(self, request_ids: list[str]) -> dict[str, WorkerState] | None:
        """This worker's data about candidates that leave. None on a worker whose outputs are not read."""
        if not self.is_read:
            return None
        moving = self.moving_runner
        return detach(self.model_runner, request_ids) if moving is None else moving.detach(request_ids)

    def rollout_attach(self, candidates: list[MovedCandidate]) -> None:
        """Add candidates with output tokens. The scheduler gets them next."""
        if self.moving_runner is None:
            attach(self.model_runner, candidates)
        else:
            self.moving_runner.attach(candidates)

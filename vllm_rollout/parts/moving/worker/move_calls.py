"""Calls of an engine core to its worker when a group leaves or comes.

Invariant: a candidate that comes looks like a preempted one to the model runner.
"""

from __future__ import annotations

from typing import Any

from vllm_rollout.parts.moving.wire import MovedCandidate, WorkerState
from vllm_rollout.parts.moving.worker.kv_calls import KVCalls


class MoveCalls(KVCalls):
    """Methods of a worker. Its model runner has `detach` and `attach`."""

    is_read: bool
    moving_runner: Any = None
    """Takes the place of the model runner on an emulated device."""

    def rollout_detach(self, request_ids: list[str]) -> dict[str, WorkerState] | None:
        """This worker's data about candidates that leave. None on a worker whose outputs are not read."""
        return (self.moving_runner or self.model_runner).detach(request_ids) if self.is_read else None

    def rollout_attach(self, candidates: list[MovedCandidate]) -> None:
        """Add candidates with output tokens. The scheduler gets them next."""
        (self.moving_runner or self.model_runner).attach(candidates)

"""Candidates that leave an emulated device and come to one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_rollout.parts.emulation.worker.runner import EmulatedRunner
from vllm_rollout.parts.moving.wire import MovedCandidate, WorkerState


class EmulatedMoves:
    """Takes the place of `candidates.py` in the calls `rollout_detach` and `rollout_attach`."""

    def __init__(self, runner: EmulatedRunner) -> None:
        self._runner = runner

    def detach(self, request_ids: Sequence[str]) -> dict[str, WorkerState]:
        """Data of candidates that leave, by request id."""
        return {request_id: WorkerState(of_parts=self._runner.take(request_id)) for request_id in request_ids}

    def attach(self, candidates: Sequence[MovedCandidate]) -> None:
        """Add candidates that have run elsewhere."""
        for candidate in candidates:
            request = candidate.request
            self._runner.put(
                request.request_id, request.prompt_token_ids, request.sampling_params, candidate.state.of_parts
            )


def emulated_moves(worker: Any) -> None:
    """Face `emulated`: no hook, but a worker with moves."""
    worker.moving_runner = EmulatedMoves(worker.runner)

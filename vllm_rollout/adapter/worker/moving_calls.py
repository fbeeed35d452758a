"""What an engine core asks of its worker when a group leaves or comes, by `collective_rpc`.

Invariant: a candidate that comes is to the model runner one that was preempted here.
"""

from __future__ import annotations

from typing import Protocol

from vllm_rollout.adapter.parcel import MovedCandidate, WorkerState


class MovingRunner(Protocol):
    """A model runner from which candidates leave, and to which they come."""

    def detach(self, request_ids: list[str]) -> dict[str, WorkerState] | None: ...

    def attach(self, candidates: list[MovedCandidate]) -> None: ...


class MovingCalls:
    """The methods of a worker that move candidates."""

    @property
    def moving_runner(self) -> MovingRunner:
        return self.model_runner  # type: ignore[attr-defined]

    def rollout_detach(self, request_ids: list[str]) -> dict[str, WorkerState] | None:
        """What this worker knows of candidates that leave; None on a worker whose outputs nobody reads."""
        return self.moving_runner.detach(request_ids)

    def rollout_attach(self, candidates: list[MovedCandidate]) -> None:
        """Candidates with output tokens come; the scheduler is told of them next."""
        self.moving_runner.attach(candidates)

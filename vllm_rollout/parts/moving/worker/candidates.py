"""Candidates that leave a model runner and come to one.

Invariant: a candidate that comes looks like a preempted one to the model runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_rollout.parts.moving.wire import MovedCandidate, WorkerState


@torch.inference_mode()
def detach(runner: Any, request_ids: Sequence[str]) -> dict[str, WorkerState]:
    """Data of candidates that leave an observed runner, by request id. Waits for the device."""
    statistics = runner.candidate_tracker.copy(request_ids)
    return {
        request_id: WorkerState(
            runner.generator_state(request_id), statistics.get(request_id), runner.parts.take(request_id)
        )
        for request_id in request_ids
    }


@torch.inference_mode()
def attach(runner: Any, candidates: Sequence[MovedCandidate]) -> None:
    """Add candidates that have run elsewhere to an observed runner."""
    for candidate in candidates:
        state = candidate.state
        runner.take_up(
            candidate.request,
            candidate.output_token_ids,
            generator=state.generator,
            statistics=state.statistics,
            of_parts=state.of_parts,
        )

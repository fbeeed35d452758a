"""Candidates that leave a model runner and come to one.

Invariant: a candidate that comes looks like a preempted one to the model runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_rollout.kernel.worker.ports import WorkerPart
from vllm_rollout.kernel.worker.runner import RunnerMixin, RunnerV1Mixin
from vllm_rollout.parts.moving.wire import MovedCandidate, WorkerState


@torch.inference_mode()
def detach(runner: Any, request_ids: Sequence[str]) -> dict[str, WorkerState]:
    """Data of candidates that leave a runner, by request id. Waits for the device."""
    return {
        request_id: WorkerState(_generator_state(runner, request_id), of_parts)
        for request_id, of_parts in runner.parts.take(request_ids).items()
    }


@torch.inference_mode()
def attach(runner: Any, candidates: Sequence[MovedCandidate]) -> None:
    """Add candidates that have run elsewhere to a runner."""
    for candidate in candidates:
        request, state = candidate.request, candidate.state
        runner.parts.put(request, state.of_parts)
        if isinstance(runner, RunnerV1Mixin):  # V2 gets a preempted request as a new one
            _know(runner, candidate)
        runner.parts.call(WorkerPart.arrived, request, candidate.output_token_ids)


def _generator_state(runner: RunnerMixin, request_id: str) -> bytes | None:
    """State of the request's own generator. None if it has none."""
    if not isinstance(runner, RunnerV1Mixin):
        return None
    request = runner.requests.get(request_id)
    if request is None or request.generator is None:
        return None
    state: bytes = request.generator.get_state().numpy().tobytes()
    return state


def _know(runner: RunnerV1Mixin, candidate: MovedCandidate) -> None:
    """Register a request with a runner, before the scheduler resumes it."""
    request, generator = candidate.request, None
    if candidate.state.generator is not None:
        generator = torch.Generator(device=runner.device)
        generator.set_state(torch.frombuffer(bytearray(candidate.state.generator), dtype=torch.uint8))
    known = runner.requests[request.request_id] = CachedRequestState(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=[],
        sampling_params=request.sampling_params,
        generator=generator,
        block_ids=(),
        num_computed_tokens=0,
        output_token_ids=list(candidate.output_token_ids),
        lora_request=request.lora_request,
    )
    if runner.uses_mrope:
        runner._init_mrope_positions(known)

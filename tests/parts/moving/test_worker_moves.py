"""Candidates that leave a worker and arrive at another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.kernel.worker.test_ports import Listener
from vllm_rollout.adapter.faults import Faults
from vllm_rollout.kernel.worker import runner as runner_module
from vllm_rollout.kernel.worker.ports import WorkerPart, WorkerParts
from vllm_rollout.parts.moving.wire import MovedCandidate, WorkerState
from vllm_rollout.parts.moving.worker.candidates import attach, detach


class Bare(runner_module.RunnerV1Mixin):
    """Runner V1 without a model."""

    def __init__(self, uses_mrope: bool = False) -> None:
        self.requests, self.device = {}, torch.device("cpu")
        self.faults = Faults()
        self.uses_mrope = uses_mrope

    def _init_mrope_positions(self, state: Any) -> None:
        state.mrope_positions, state.mrope_position_delta = torch.arange(3).expand(3, -1), 0


def moved_to(target: Bare, state: WorkerState) -> Any:
    params = SimpleNamespace(prompt_token_ids=[1, 2, 3], sampling_params=None, lora_request=None, request_id="a")
    attach(target, [MovedCandidate(0, params, [5], 1, True, None, [], 0, state)])
    return target.requests["a"]


def test_what_is_not_observed_moves_with_its_generator_alone():
    """The request goes on elsewhere with its draws."""
    source, generator = Bare(), torch.Generator().manual_seed(7)
    source.requests["a"] = SimpleNamespace(generator=generator)
    its = moved_to(Bare(), detach(source, ["a"])["a"]).generator
    assert torch.equal(torch.rand(4, generator=its), torch.rand(4, generator=generator))


def test_who_comes_has_the_positions_of_a_model_that_reads_images():
    """Without them vLLM's engine ends in the next step, also where the prompt is text."""
    assert moved_to(Bare(uses_mrope=True), WorkerState()).mrope_positions.shape == (3, 3)
    assert moved_to(Bare(), WorkerState()).mrope_positions is None


def test_a_part_hears_of_candidates_that_have_run_elsewhere_and_of_the_end():
    target, part = Bare(), Listener()
    target.parts = WorkerParts([("listener", part)])
    moved_to(target, WorkerState())
    target.parts.call(WorkerPart.stop)
    assert part.heard == [("arrived", "a", [5]), ("stop",)]

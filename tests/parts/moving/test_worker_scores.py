"""Scored candidates that leave a worker and arrive at another."""

from types import SimpleNamespace

import pytest
from vllm.v1.engine import EngineCoreRequest

from tests.kernel.worker.runners import Row, RunnerV1
from tests.parts.pruning.test_runner import new_request, new_ring, observe
from vllm_rollout.parts.moving.wire import MovedCandidate
from vllm_rollout.parts.moving.worker.candidates import attach, detach


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_scored_candidate_that_moves_is_scored_where_it_arrives(num_tokens):
    """Its statistics and its features go along, by calls as of an engine core."""
    runners = []
    for _ in range(2):
        runner = RunnerV1()
        observe(runner, new_ring(), v2=False, cpu=False)
        runner.requests, runner.uses_mrope = {}, False
        runners.append(runner)
    here, there = runners
    request = new_request("a", 3, 2)
    for number in range(num_tokens):
        rows = [Row("a", 3 + number, 3 + number)]
        scheduled = SimpleNamespace(rows=rows, scheduled_new_reqs=() if number else (request,), finished_req_ids=set())
        here.execute_model(scheduled)
        here.sample_tokens()
    state = detach(here, ["a"])["a"]
    assert ("pruning" in state.of_parts) == (num_tokens >= 2)
    moved = EngineCoreRequest("a", [0] * 3, None, request.sampling_params, None, 0.0, None, None, None)
    attach(there, [MovedCandidate(0, moved, [5] * num_tokens, 1, True, None, [], 0, state)])
    assert there.candidate_tracker.copy(["a"]) == here.candidate_tracker.copy(["a"])
    scored_at = there.candidate_tracker.parts[0].scored_at("a")
    assert scored_at == [2]
    assert detach(there, ["a"])["a"] == state

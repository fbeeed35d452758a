"""Pruned candidates in a stream of tokens."""

from __future__ import annotations

from tests.kernel.http.test_stream_tokens import RACE, announced, assert_announcements_hold, num_after
from tests.parts.pruning.learning_steps import PRUNING, teach
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.service import RolloutService


async def test_a_pruned_candidate_is_announced_while_its_siblings_run(app, http) -> None:
    await teach(http)
    service: RolloutService = app.state.rollout_service
    arguments = {**RACE, "pruning": PRUNING, "sampling_params": {"seed": 7, "min_tokens": 30}}
    arguments |= {"stream": True, "stream_tokens": 1}
    rollout = await service.prepare(RolloutRequest.model_validate(arguments))
    events = [event async for event in service.events(rollout)]
    positions = announced(events, "pruned")
    assert positions
    for position in positions:
        assert num_after(events, position) >= 4 * 20
    assert_announcements_hold(events)

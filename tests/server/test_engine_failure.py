"""What becomes of a group whose rank dies: it fails, or it runs again, and its siblings in the request go on."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from vllm_rollout import RolloutClient
from vllm_rollout.server.answers import GroupEvent, RestartedEvent, RolloutAnswer, TokensEvent, TrajectoryEvent
from vllm_rollout.server.service import RolloutService

from .fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

PROMPTS = [{"id": "a", "prompt": "one"}, {"id": "b", "prompt_token_ids": [1, 2, 3]}]
LENGTHS = {0: 4, 1: 12, 2: 13, 3: 14}
REASON = "rank 1 of the engine died"


async def rollout(http: httpx.AsyncClient, **fields: object) -> RolloutAnswer:
    body = {"prompts": PROMPTS, "group_size": 3, "redundancy": 1, "sampling": {"seed": 7}, **fields}
    answer = await http.post("/v1/rollouts", json=body)
    assert answer.status_code == 200, answer.text
    return RolloutAnswer.model_validate_json(answer.content)


async def test_without_retry_what_had_ended_is_returned_and_the_reason_is_said(http, engine: FakeEngine) -> None:
    engine.lengths, engine.losses = LENGTHS, {"b": 8}
    whole, lost = (await rollout(http)).groups
    assert (whole.status, len(whole.trajectories)) == ("complete", 3)
    assert lost.status == "incomplete"
    assert lost.reason.endswith(f"(3 failed): {REASON}")
    assert [trajectory.index for trajectory in lost.trajectories] == [0]
    assert [(c.index, c.state, c.num_tokens) for c in lost.candidates] == [(i, "failed", 8) for i in (1, 2, 3)]


async def test_with_retry_the_answer_is_that_of_an_engine_that_never_died(http, engine: FakeEngine) -> None:
    engine.lengths = LENGTHS
    expected = await rollout(http)
    engine.losses = {"a": 2, "b": 8}
    answer = await rollout(http, on_engine_failure="retry")
    without_ids = [group.model_dump(exclude={"group_id"}) for group in answer.groups]
    assert without_ids == [group.model_dump(exclude={"group_id"}) for group in expected.groups]
    assert answer.usage.num_restarted == 2
    assert answer.usage.model_copy(update={"num_restarted": 0}) == expected.usage


async def test_places_and_candidates_are_counted_once(app, engine: FakeEngine) -> None:
    engine.lengths, engine.losses, engine.num_launch_places = LENGTHS, {"a": 5, "b": 8}, 4
    service: RolloutService = app.state.rollout_service
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        answer = await asyncio.wait_for(rollout(http, on_engine_failure="retry"), 30)
    assert [group.status for group in answer.groups] == ["complete"] * 2
    assert service._launcher.num_taken == 0
    assert engine.num_running == 0


def test_a_stream_says_that_a_group_begins_anew_and_what_came_before_is_void(
    client: RolloutClient, engine: FakeEngine
) -> None:
    engine.lengths, engine.losses = LENGTHS, {"b": 8}
    options = {"sampling": {"seed": 7}, "on_engine_failure": "retry"}
    events = list(client.stream(PROMPTS, 3, 1, stream_tokens=1, **options))
    (restart,) = [position for position, event in enumerate(events) if isinstance(event, RestartedEvent)]
    assert (events[restart].prompt_id, events[restart].reason) == ("b", REASON)
    tokens: dict[int, list[int]] = {}
    for event in events[restart:]:
        if isinstance(event, TokensEvent) and event.prompt_id == "b":
            assert event.offset == len(tokens.setdefault(event.index, []))
            tokens[event.index] += event.token_ids
        elif isinstance(event, TrajectoryEvent) and event.prompt_id == "b":
            assert tokens[event.trajectory.index] == event.trajectory.token_ids
    (group,) = [event for event in events if isinstance(event, GroupEvent) and event.prompt_id == "b"]
    assert (group.status, group.selected) == ("complete", [0, 1, 2])


async def test_a_run_retries_in_each_round(http, engine: FakeEngine) -> None:
    engine.lengths = LENGTHS
    run = {"id": "r", "group_size": 3, "prompts_per_round": 2, "prompt_speculation": 1.0, "on_engine_failure": "retry"}
    assert (await http.post("/v1/runs", json=run)).is_success
    engine.losses = {"a": 3}
    answer = await http.post("/v1/runs/r/rounds", json={"prompts": PROMPTS})
    assert answer.status_code == 200, answer.text
    assert [group["status"] for group in answer.json()["groups"]] == ["complete"] * 2
    assert answer.json()["usage"]["num_restarted"] == 1


async def test_an_unknown_way_is_refused_with_those_there_are(http) -> None:
    body = {"prompts": PROMPTS, "group_size": 3, "on_engine_failure": "pray"}
    answer = await http.post("/v1/rollouts", json=body)
    assert answer.status_code == 422
    assert all(word in answer.json()["error"]["message"] for word in ("on_engine_failure", "pray", "fail", "retry"))

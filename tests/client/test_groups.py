"""Groups out of a stream are those that a rollout answers."""

from __future__ import annotations

from typing import Any

from vllm_rollout import RolloutClient
from vllm_rollout.client.groups import GroupStream
from vllm_rollout.server.answers import GroupAnswer, RestartedEvent, RewardEvent, Trajectory, TrajectoryEvent

PROMPTS = [{"id": f"q{i}", "prompt": f"question {i}"} for i in range(5)]


def what_is_said(group: GroupAnswer) -> dict[str, Any]:
    said = group.model_dump(mode="json", exclude={"group_id"})
    said["candidates"].sort(key=lambda candidate: candidate["index"])
    return said


def test_they_are_those_of_a_rollout(client: RolloutClient) -> None:
    asked = {"group_size": 2, "redundancy": 2, "sampling": {"seed": 3}}
    stream = GroupStream(client.stream(PROMPTS, **asked))
    assert stream.summary is None
    groups = {group.prompt_id: what_is_said(group) for group in stream}
    answer = client.rollout(PROMPTS, **asked)
    assert groups == {group.prompt_id: what_is_said(group) for group in answer.groups}
    assert stream.summary is not None
    assert stream.summary.usage == answer.usage


def test_rewards_come_later_and_a_group_that_runs_again_forgets(client: RolloutClient) -> None:
    events = list(client.stream(PROMPTS[:1], 2, sampling={"seed": 3}))
    name = {"prompt_id": "q0", "group_id": events[0].group_id}
    lost = TrajectoryEvent(**name, trajectory=Trajectory(index=9, num_tokens=1, token_ids=[1], finish_reason="stop"))
    again = RestartedEvent(**name, reason="the engine died")
    last = next(place for place, event in enumerate(events) if event.type == "group")
    rewards = [RewardEvent(**name, index=index, reward=float(index)) for index in (0, 1)]
    (group,) = GroupStream([lost, again, *events[:last], *rewards, *events[last:]])
    assert [(t.index, t.reward) for t in group.trajectories] == [(0, 0.0), (1, 1.0)]
    assert group.candidates == []

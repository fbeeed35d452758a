"""Whatever graders and clients do, a graded rollout keeps its promises."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.group.rewards.time_limits import TimeLimits
from vllm_rollout.rewards.slots import Urgency
from vllm_rollout.rewards.values import Grade, Trajectory
from vllm_rollout.server.answers import RolloutAnswer

from .conftest import events_of, http_of, make_app
from .fake_engine import FakeEngine


class ChanceGraders:
    """Grades by chance, after a few turns of the loop."""

    names = ("chance",)
    limits = TimeLimits()

    def __init__(self, chance: random.Random, success: float, trouble: float) -> None:
        self._chance, self._success, self._trouble = chance, success, trouble

    async def grade(
        self, name: str, trajectory: Trajectory, *, timeout_s: float | None = None, urgency: Urgency
    ) -> Grade:
        for _ in range(self._chance.randrange(20)):
            await asyncio.sleep(0)
        if self._chance.random() < self._trouble:
            status = self._chance.choice(["void", "error", "timeout"])
            return Grade(status, 0.0 if status == "timeout" else None, status)
        return Grade("ok", float(self._chance.random() < self._success))


async def rolled(seed: int, success: float, trouble: float, losses: dict[str, int], body: dict[str, Any]) -> None:
    engine = FakeEngine(losses=dict(losses), failures={3: 2})
    app = make_app(engine, graders=ChanceGraders(random.Random(seed), success, trouble))
    async with http_of(app) as http:
        if body.pop("stream"):
            events = await events_of(http, "/v1/rollouts", **body)
            groups = [event for event in events if event["type"] == "group"]
            assert events[-1]["type"] == "done", events[-1]
            usage = events[-1]["usage"]
            assert len(groups) == len(body["prompts"])
        else:
            response = await http.post("/v1/rollouts", json=body)
            assert response.status_code == 200, response.text
            answer = RolloutAnswer.model_validate_json(response.content)
            usage = answer.usage.model_dump()
            for group in answer.groups:
                check(group, body)
    assert engine.num_running == 0
    assert usage["generated_tokens"] == usage["returned_tokens"] + usage["wasted_tokens"]


def check(group: Any, body: dict[str, Any]) -> None:
    indices = [each.index for each in (*group.trajectories, *group.candidates)]
    assert len(indices) == len(set(indices))
    assert len(indices) <= body["max_candidates"]
    assert (len(group.trajectories) == body["group_size"]) == (group.status == "complete")
    assert all(t.reward_status in ("ok", "timeout", "error") for t in group.trajectories)
    assert [a is None for a in group.rewards.advantages] == [t.reward is None for t in group.trajectories]
    if body["until"] == "variance":
        rewards = [t.reward for t in group.trajectories]
        assert None not in rewards
        assert group.rewards.teaches == (len(set(rewards)) > 1)
        assert group.rewards.teaches or group.status == "incomplete" or len(indices) == body["max_candidates"]


@pytest.mark.thorough
@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    success=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    trouble=st.sampled_from([0.0, 0.1, 0.9]),
    until=st.sampled_from(["complete", "variance"]),
    early_stop=st.booleans(),
    group_size=st.integers(2, 5),
    redundancy=st.integers(0, 3),
    more=st.integers(0, 12),
    stream=st.booleans(),
    loss=st.none() | st.integers(0, 10),
)
def test_a_graded_rollout_keeps_its_promises(
    seed, success, trouble, until, early_stop, group_size, redundancy, more, stream, loss
):
    body = {
        "prompts": [{"id": id, "prompt": id} for id in "ab"],
        "group_size": group_size,
        "redundancy": redundancy,
        "early_stop": early_stop,
        "until": until,
        "max_candidates": group_size + redundancy + more,
        "reward": "chance",
        "on_engine_failure": "retry" if seed % 2 else "fail",
        "sampling": {"seed": seed % 1000},
        "stream": stream,
    }
    losses = {} if loss is None else {"a": loss}
    asyncio.run(asyncio.wait_for(rolled(seed, success, trouble, losses, body), 60))

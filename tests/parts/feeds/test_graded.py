"""Feeds whose groups the server grades."""

from __future__ import annotations

import pytest
from fastapi import FastAPI

from tests.kernel.http.conftest import http_of, make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.feeds.test_feeds import ids, make, put, take, update
from tests.parts.pruning.learning_steps import PRUNING
from tests.parts.rewards.test_grading import FakeGraders
from tests.support.waiting import eventually
from vllm_rollout.kernel.http.engine import GroupOrder
from vllm_rollout.kernel.rules.rewards import Grade


@pytest.fixture
def graders() -> FakeGraders:
    return FakeGraders()


@pytest.fixture
def app(engine: FakeEngine, graders: FakeGraders) -> FastAPI:
    return make_app(engine, graders=graders)


async def test_groups_without_variance_are_filtered_and_give_their_places_back(http, engine) -> None:
    engine.lengths = {0: 2, 1: 4}  # both even: the same reward
    await make(http, batch=2, max_staleness=0, reward="even", filter="zero_variance")
    await put(http, 0, 4)
    batch = await take(http, drain=True)
    assert (batch["groups"], sorted(batch["filtered"])) == ([], ["q0", "q1", "q2", "q3"])
    assert batch["meter"]["filtered"] == {"num_groups": 4, "mean_tokens": 3.0, "mean_reward": 1.0}


async def test_groups_without_a_reward_are_no_filtered_groups(engine) -> None:
    graders = FakeGraders(lambda _: Grade("error", reason="the reward function raised KeyError."))
    async with http_of(make_app(engine, graders=graders)) as http:
        await make(http, batch=2, max_staleness=0, reward="even", filter="zero_variance")
        await put(http, 0, 2)
        batch = await take(http, drain=True)
    assert (batch["groups"], batch["filtered"]) == ([], [])
    failed = {each["prompt_id"]: each["reason"] for each in batch["failed"]}
    assert failed == dict.fromkeys(("q0", "q1"), "the reward function raised KeyError.")


async def test_a_batch_has_the_rewards_of_its_groups(http, engine) -> None:
    engine.lengths = {0: 2, 1: 3}
    await make(http, batch=2, reward="even", filter="zero_variance")
    await put(http, 0, 2)
    batch = await take(http)
    assert sorted(ids(batch)) == ["q0", "q1"]
    assert [each["reward"] for each in batch["groups"][0]["trajectories"]] == [1.0, 0.0]
    assert batch["groups"][0]["rewards"]["teaches"]
    assert batch["meter"]["trained"]["mean_reward"] == 0.5


async def test_a_group_for_whose_refill_no_rank_is_left_starts_again(http, engine, graders, monkeypatch) -> None:
    monkeypatch.setattr("vllm_rollout.parts.feeds.http.live.AGAIN_S", 0.01)
    refused = []

    def finds_no_rank(order: GroupOrder) -> bool:
        if "+" in order.group_id:
            refused.append(order.group_id)
        return "+" in order.group_id

    engine.finds_no_rank = finds_no_rank
    graders.function = lambda trajectory: Grade("ok" if refused else "void", 1.0 if refused else None)
    await make(http, batch=1, max_staleness=0, reward="even")
    await put(http, 0, 1)
    batch = await take(http)
    assert (ids(batch), batch["failed"], bool(refused)) == (["q0"], [], True)


async def test_deferred_prompts_run_again_with_pruning_and_rewards(app, http, engine) -> None:
    engine.step_s, engine.lengths = 0.002, {0: 60, 1: 61, 2: 62, 3: 63}
    await make(http, on_stale="defer", max_staleness=0, batch=2, redundancy=2, reward="even", pruning=PRUNING)
    await put(http, 0, 2)
    await eventually(lambda: engine.num_running == 8)
    await update(app, engine, "1")
    batch = await take(http)
    assert (batch["deferred"], batch["failed"], sorted(ids(batch))) == (["q0", "q1"], [], ["q0", "q1"])
    for group in batch["groups"]:
        assert [each["reward"] for each in group["trajectories"]] == [1.0, 0.0]
        assert group["candidates"] == []

"""POST /v1/rewards: candidates of any groups, by what their answers showed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from vllm_rollout import RolloutClient
from vllm_rollout.group.judging.ledger import request_name
from vllm_rollout.server.clients import ClientNamespaces, client_namespace
from vllm_rollout.server.learning.body import NamedRewardsAnswer

from .fake_engine import FakeEngine
from .learning_steps import PRUNING, roll
from .test_errors import check_error
from .test_metrics import samples

pytestmark = pytest.mark.anyio


async def post(http: httpx.AsyncClient, *rewards: dict[str, Any], **headers: str) -> NamedRewardsAnswer:
    response = await http.post("/v1/rewards", json={"rewards": rewards}, headers=headers)
    assert response.status_code == 200, response.text
    return NamedRewardsAnswer.model_validate_json(response.content)


def by_group(answer: Any) -> list[dict[str, Any]]:
    return [
        {"group_id": group.group_id, "index": trajectory.index, "reward": float(trajectory.index % 2)}
        for group in answer.groups
        for trajectory in group.trajectories
    ]


async def test_groups_of_several_rollouts_learn_from_one_post(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    answers = [await roll(http), await roll(http)]
    rewards = [reward for answer in answers for reward in by_group(answer)]
    receipt = await post(http, *rewards)
    assert [(r.group_id, r.index, r.request_id) for r in receipt.results] == [
        (reward["group_id"], reward["index"], None) for reward in rewards
    ]
    assert {(r.status, r.message) for r in receipt.results} == {("accepted", None)}
    assert receipt.num_training == receipt.counts.accepted == len(rewards)
    assert list(receipt.head_versions) == [PRUNING["detection_length"]]
    again = await post(http, *rewards)
    assert again.counts.duplicate == len(rewards)
    assert sum(engine.learning.judge.ledger.num_awaiting().values()) == 0
    counted = await samples(http)
    assert counted["rewards_total.accepted"] == len(rewards)


async def test_a_group_is_rewarded_once_whichever_way_it_is_named(http: httpx.AsyncClient) -> None:
    answer = await roll(http)
    rewards = by_group(answer)
    await post(http, *rewards[:3])
    named = [
        {"prompt_id": group.prompt_id, "index": trajectory.index, "reward": float(trajectory.index % 2)}
        for group in answer.groups
        for trajectory in group.trajectories
    ]
    response = await http.post(f"/v1/rollouts/{answer.id}/rewards", json={"rewards": named})
    assert [result["status"] for result in response.json()["results"]] == ["duplicate"] * 3 + ["accepted"] * 9


async def test_what_nothing_is_known_of_is_said_one_by_one(http: httpx.AsyncClient) -> None:
    answer = await roll(http)
    group_id = answer.groups[0].group_id
    receipt = await post(
        http,
        {"group_id": group_id, "index": 99, "reward": 1.0},
        {"group_id": "nobody's", "reward": 1.0},
        {"request_id": group_id, "index": 0, "reward": 1.0},
        by_group(answer)[0],
    )
    assert [result.status for result in receipt.results] == ["unknown", "unknown", "unknown", "accepted"]
    assert "take id and index from the answer" in receipt.results[0].message
    nothing = await post(http, {"request_id": "cmpl-1", "reward": 0.0})
    assert (nothing.counts.unknown, nothing.head_versions, nothing.num_training) == (1, {}, 0)


async def test_a_client_names_the_requests_of_its_own_key_only(
    app: FastAPI, http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    app.add_middleware(ClientNamespaces)
    answer = await roll(http)
    group = answer.groups[0]
    digests = []
    for key in ("Bearer one", "Bearer two"):
        # What an engine does when a request of that client has its answer.
        seen = await namespace_of(app, http, key)
        digests.append(seen)
        choices = {0: group.trajectories[len(digests) - 1].index}
        engine.learning.judge.ledger.name(request_name(seen, "cmpl-1"), group.group_id, choices)
    assert len({*digests, ""}) == 3
    assert "one" not in digests[0]
    mine = {"request_id": "cmpl-1", "index": 0, "reward": 1.0}
    first, second, other = [await post(http, mine, authorization=f"Bearer {key}") for key in ("one", "two", "three")]
    assert (first.counts.accepted, second.counts.accepted, other.counts.unknown) == (1, 1, 1)


async def test_a_name_has_the_namespace_that_its_request_came_with(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await roll(http)
    group = answer.groups[0]
    for namespace, trajectory in zip(("run-1", "run-2"), group.trajectories, strict=False):
        engine.learning.judge.ledger.name(request_name("", "cmpl-1", namespace), group.group_id, {0: trajectory.index})

    async def status(**namespace: str) -> str:
        body = {"rewards": [{"request_id": "cmpl-1", "reward": 1.0}], **namespace}
        (result,) = (await http.post("/v1/rewards", json=body)).json()["results"]
        return result["status"]

    assert [await status(), await status(namespace="run-3")] == ["unknown"] * 2
    assert [await status(namespace="run-1"), await status(namespace="run-2")] == ["accepted"] * 2
    assert await status(namespace="run-1") == "duplicate"


async def namespace_of(app: FastAPI, http: httpx.AsyncClient, key: str) -> str:
    if not any(route.path == "/namespace" for route in app.routes):
        app.get("/namespace")(lambda: client_namespace())
    return (await http.get("/namespace", headers={"authorization": key})).json()


@pytest.mark.parametrize(
    ("reward", "param", "words"),
    [
        ({"index": 0, "reward": 1.0}, "rewards.0", ["either request_id", "or group_id"]),
        ({"request_id": "a", "group_id": "b", "reward": 1.0}, "rewards.0", ["either request_id", "or group_id"]),
        ({"request_id": "", "reward": 1.0}, "rewards.0.request_id", ["at least 1"]),
        ({"request_id": "a", "index": -1, "reward": 1.0}, "rewards.0.index", ["-1"]),
        ({"request_id": "a", "reward": "high"}, "rewards.0.reward", ["high"]),
        ({"request_id": "a", "reward": 1.0, "prompt_id": "p"}, "rewards.0.prompt_id", ["request_id, group_id"]),
    ],
)
async def test_a_bad_entry_is_named(
    http: httpx.AsyncClient, reward: dict[str, Any], param: str, words: list[str]
) -> None:
    check_error(await http.post("/v1/rewards", json={"rewards": [reward]}), 422, param, words)


def test_the_client_posts_by_request_and_by_group(client: RolloutClient) -> None:
    rollout = client.rollout(["a"], 4, 4, pruning=PRUNING, sampling={"min_tokens": 12})
    (group,) = rollout.groups
    first, second = group.trajectories[:2]
    receipt = client.post_named_rewards(
        [
            {"group_id": group.group_id, "index": first.index, "reward": 1},
            {"group_id": group.group_id, "index": second.index, "reward": 0.3},
            ("chatcmpl-1", 0, 1.0),
        ],
        threshold=0.2,
    )
    assert [result.status for result in receipt.results] == ["accepted", "accepted", "unknown"]
    assert receipt.threshold == 0.2
    with pytest.raises(TypeError, match=r"rewards\[0\] must be \(request_id, index, reward\)"):
        client.post_named_rewards([("chatcmpl-1", 0)])

"""POST /v1/rollouts/{id}/rewards and /v1/rewards: every reward gets a status, and learning shows in the next one."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from tests.kernel.http.fake_engine import FakeEngine
from tests.kernel.http.test_errors import check_error
from tests.kernel.http.test_metrics import samples
from tests.parts.pruning.fakes import FakeLearning, succeeded
from tests.parts.pruning.learning_steps import PRUNING, post, rewards_of, roll, teach
from vllm_rollout import RolloutClient, RolloutError
from vllm_rollout.config import MAX_REMEMBERED_CANDIDATES
from vllm_rollout.kernel.http.clients import ClientNamespaces, client_namespace
from vllm_rollout.kernel.http.rewards import MAX_REWARDS, NamedRewardsAnswer, RewardEntry
from vllm_rollout.kernel.rules.rewards import RewardStatus, request_name
from vllm_rollout.parts.pruning.http.plan import LearningPlan


def entry(prompt_id: str, index: int, reward: float) -> dict[str, Any]:
    return {"prompt_id": prompt_id, "index": index, "reward": reward}


async def test_every_status_comes_in_the_order_of_the_list_with_its_reason(http, engine: FakeEngine):
    engine.lengths = {0: 4, 1: 20, 2: 21, 3: 22, 4: 90, 5: 91, 6: 92, 7: 93}
    answer = await roll(http, sampling_params={"seed": 1})
    posted = [
        entry("a", 0, 1.0),  # ended before detection
        entry("a", 1, 1.0),
        entry("a", 1, 1.0),
        entry("a", 1, 0.0),
        entry("a", 7, 1.0),  # surplus
        entry("a", 8, 1.0),  # there are 8
        entry("z", 0, 1.0),  # no such prompt
        entry("b", 2, 0.0),
    ]
    receipt = await post(http, answer, rewards=posted)
    statuses = [result.status for result in receipt.results]
    assert statuses == [
        "unscored", "accepted", "duplicate", "conflict", "unfinished", "unknown", "unknown", "accepted",
    ]  # fmt: skip
    assert receipt.counts.model_dump() == Counter(statuses)
    assert receipt.num_training == 2
    words = {
        "unscored": "before detection_length",
        "duplicate": "nothing changes",
        "conflict": "stays",
        "unfinished": "no reward is expected",
        "unknown": "check prompt_id and index",
    }
    for result in receipt.results:
        assert (result.message is None) == (result.status == "accepted")
        assert result.message is None or words[result.status] in result.message


async def test_partial_rewards_leave_the_others_awaited_and_posting_again_changes_nothing(http):
    answer = await roll(http)
    rewards = rewards_of(answer)
    for num_posted in (5, 12, 12):
        receipt = await post(http, answer, rewards=rewards[:num_posted])
        assert (receipt.id, receipt.head_version, receipt.threshold) == (answer.id, 0, 0.5)
        report = (await http.get("/v1/quality_head/report")).json()
        assert report["num_awaiting"] == 12 - num_posted
    assert (receipt.counts.duplicate, receipt.num_training) == (12, 0)
    signal = report["signals"]["confidence"]
    assert signal["num_positive"] + signal["num_negative"] == 12


@pytest.mark.parametrize(
    ("rewards", "fields", "num_positive"),
    [
        ([0, 1, 1, 0], {}, 2),
        ([-1, 1, 1, 1], {}, 3),
        ([0.2, 0.5, 0.51, 0.9], {}, 2),
        ([0.2, 0.5, 0.51, 0.9], {"threshold": 0.1}, 4),
        ([-3.0, -2.0, -1.0, 1e100], {"threshold": -2}, 2),
    ],
)
async def test_a_reward_above_the_threshold_is_positive(http, rewards, fields, num_positive):
    answer = await roll(http, prompts=[{"id": "a", "prompt": "a"}])
    indices = [t.index for t in answer.groups[0].trajectories]
    posted = [entry("a", index, reward) for index, reward in zip(indices, rewards, strict=True)]
    receipt = await post(http, answer, rewards=posted, **fields)
    assert receipt.threshold == fields.get("threshold", 0.5)
    signal = (await http.get("/v1/quality_head/report")).json()["signals"]["confidence"]
    assert (signal["num_positive"], signal["num_negative"]) == (num_positive, 4 - num_positive)


@pytest.mark.parametrize("rollout_id", ["rollout-1", "state", "x" * 5000, "%00", "ä", "without pruning"])
async def test_a_rollout_nobody_knows_is_a_404_that_says_what_is_remembered(http, rollout_id):
    if rollout_id == "without pruning":
        rollout_id = (await roll(http, pruning=None)).id
    response = await http.post(f"/v1/rollouts/{rollout_id}/rewards", json={"rewards": [entry("a", 0, 1)]})
    words = ["asked for with pruning", str(MAX_REMEMBERED_CANDIDATES), "before the next restart"]
    check_error(response, 404, None, [*words, "from the rollout's answer"])


BAD = {
    # name: body, param, words of the message
    "missing": ({}, "rewards", ["required", f"1 to {MAX_REWARDS}"]),
    "empty": ({"rewards": []}, "rewards", [f"1 to {MAX_REWARDS}", "list of 0"]),
    "too_many": ({"rewards": [entry("a", 0, 1)] * (MAX_REWARDS + 1)}, "rewards", [str(MAX_REWARDS), "100001"]),
    "no_reward": ({"rewards": [{"prompt_id": "a", "index": 0}]}, "rewards.0.reward", ["required", "finite number"]),
    "reward_string": ({"rewards": [entry("a", 0, "1")]}, "rewards.0.reward", ["got '1'", "number"]),
    "reward_huge": ({"rewards": [entry("a", 0, 10**400)]}, "rewards.0.reward", ["number"]),
    "reward_without_a_square": ({"rewards": [entry("a", 0, -1e101)]}, "rewards.0.reward", ["got -1e+101", "1e+100"]),
    "index_negative": ({"rewards": [entry("a", -1, 1)]}, "rewards.0.index", ["got -1", "from 0"]),
    "prompt_id_number": ({"rewards": [entry(1, 0, 1)]}, "rewards.0.prompt_id", ["got 1", "rollout's answer"]),
    "unknown_field": ({"rewards": [{**entry("a", 0, 1), "rewards": 1}]}, "rewards.0.rewards", ["not a field"]),
    "unknown_top_field": ({"rewards": [entry("a", 0, 1)], "prompts": []}, "prompts", ["not a field", "threshold"]),
    "threshold_string": ({"rewards": [entry("a", 0, 1)], "threshold": "0"}, "threshold", ["got '0'", "number"]),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", BAD)
async def test_bad_rewards_are_explained_and_teach_nothing(http, name):
    answer = await roll(http)
    bad, param, words = BAD[name]
    response = await http.post(f"/v1/rollouts/{answer.id}/rewards", json=bad)
    check_error(response, 400, param, words)
    assert (await post(http, answer)).counts.accepted == 12


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["reward", "threshold"])
async def test_rewards_that_are_no_finite_number_are_explained(http, number, field):
    answer = await roll(http)
    other = {"reward": 1.0, "threshold": 0.5}
    reward = number if field == "reward" else other["reward"]
    threshold = number if field == "threshold" else other["threshold"]
    content = f'{{"rewards": [{{"prompt_id": "a", "index": 0, "reward": {reward}}}], "threshold": {threshold}}}'
    headers = {"content-type": "application/json"}
    response = await http.post(f"/v1/rollouts/{answer.id}/rewards", content=content.encode(), headers=headers)
    check_error(response, 400, "rewards.0.reward" if field == "reward" else "threshold", ["finite number"])


@pytest.mark.thorough
async def test_a_hundred_thousand_rewards_are_taken_at_once(http):
    answer = await roll(http)
    many = rewards_of(answer) * (MAX_REWARDS // 12)
    receipt = await post(http, answer, rewards=many)
    assert (receipt.counts.accepted, receipt.counts.duplicate) == (12, len(many) - 12)


async def test_gauges_follow_rewards_but_not_each_of_them(http, app, engine: FakeEngine):
    now = 0.0
    app.state.rollout_service.part(LearningPlan).learning._clock = lambda: now
    before = await samples(http)
    for status in get_args(RewardStatus):
        assert before[f"rewards_total.{status}"] == 0
    answer = await roll(http)
    await post(http, answer)
    await post(http, answer)
    after = await samples(http)
    assert (after["rewards_total.accepted"], after["rewards_total.duplicate"]) == (12, 12)
    assert after["labels_total.positive"] + after["labels_total.negative"] == 12
    num_reports = engine.part(FakeLearning).num_reports
    assert after["rewards_awaited.8"] == after["features_evicted_total.8"] == after["head_version.8"] == 0
    assert "calibration_brier.8.head" not in after
    await teach(http)
    assert engine.part(FakeLearning).num_reports == num_reports + 1  # the cold start of the first asked for one
    assert (await samples(http))["head_version.8"] == 0
    now = 60.0
    await post(http, await roll(http))
    after = await samples(http)
    report = (await http.get("/v1/quality_head/report")).json()
    assert after["head_version.8"] == report["head"]["version"] > 0
    for signal in ("head", "confidence"):
        for gauge, field in (("auc", "auc"), ("within_group_auc", "within_group_auc"), ("calibration_brier", "brier")):
            assert after[f"{gauge}.8.{signal}"] == pytest.approx(report["signals"][signal][field])
    assert after["score_count.head"] + after["score_count.confidence"] == after["survival_probability_count"] == 24 * 10


def test_both_kinds_of_reward_reach_the_server(client: RolloutClient):
    rollout = client.rollout(["a"], 4, 4, pruning=PRUNING, sampling_params={"min_tokens": 12})
    trajectories = rollout.groups[0].trajectories
    first, second, third, fourth = (t.index for t in trajectories)
    receipt = client.post_rewards(
        rollout.id,
        [
            ("0", first, 1),
            (np.str_("0"), np.int64(second), np.float32(0.25)),
            {"prompt_id": "0", "index": np.int64(third), "reward": np.float64(0)},
            RewardEntry(prompt_id="0", index=fourth, reward=succeeded(trajectories[3].token_ids) * 1.0),
        ],
        threshold=0.2,
    )
    assert receipt.counts.accepted == 4
    assert client.report().signals["confidence"].num_positive >= 2


@pytest.mark.parametrize(
    ("reward", "error"),
    [
        (("0", 0), TypeError),
        (("0", "first", 1.0), TypeError),
        ({"prompt_id": "0", "index": 0}, TypeError),
        (("0", 0, "high"), TypeError),
        (("0", 0, float("nan")), ValueError),
    ],
)
def test_rewards_of_no_known_form_are_refused_before_they_travel(reward, error):
    with RolloutClient("http://127.0.0.1:9") as client, pytest.raises(error, match=r"rewards\[1\]"):
        client.post_rewards("rollout-1", [("0", 0, 1.0), reward])


def test_a_rollout_id_cannot_reach_another_endpoint(client: RolloutClient):
    with pytest.raises(RolloutError, match=r"Not Found|no rollout") as raised:
        client.post_rewards("../../v1/votes?x=", [("0", 0, 1.0)])
    assert raised.value.status == 404


async def post_named(http: httpx.AsyncClient, *rewards: dict[str, Any], **headers: str) -> NamedRewardsAnswer:
    response = await http.post("/v1/rewards", json={"rewards": rewards}, headers=headers)
    assert response.status_code == 200, response.text
    return NamedRewardsAnswer.model_validate_json(response.content)


async def test_a_client_names_the_requests_of_its_own_key_only(app, http, engine):
    app.add_middleware(ClientNamespaces)
    answer = await roll(http)
    group = answer.groups[0]
    digests = []
    for key in ("Bearer one", "Bearer two"):
        # What an engine does when a request of that client has its answer.
        seen = await namespace_of(app, http, key)
        digests.append(seen)
        choices = {0: group.trajectories[len(digests) - 1].index}
        engine.part(FakeLearning).judge.ledger.name(request_name(seen, "cmpl-1"), group.group_id, choices)
    assert len({*digests, ""}) == 3
    assert "one" not in digests[0]
    mine = {"request_id": "cmpl-1", "index": 0, "reward": 1.0}
    first, second, other = [
        await post_named(http, mine, authorization=f"Bearer {key}") for key in ("one", "two", "three")
    ]
    assert (first.counts.accepted, second.counts.accepted, other.counts.unknown) == (1, 1, 1)


async def test_a_name_has_the_namespace_that_its_request_came_with(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer, ledger = await roll(http), engine.part(FakeLearning).judge.ledger
    group = answer.groups[0]
    for namespace, trajectory in zip(("run-1", "run-2"), group.trajectories, strict=False):
        ledger.name(request_name("", "cmpl-1", namespace), group.group_id, {0: trajectory.index})

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
        ({"request_id": "a", "reward": 1e101}, "rewards.0.reward", ["1e+101", "1e+100"]),
        ({"request_id": "a", "reward": 1.0, "prompt_id": "p"}, "rewards.0.prompt_id", ["request_id, group_id"]),
    ],
)
async def test_a_bad_entry_of_a_named_reward_is_named(http, reward, param, words):
    check_error(await http.post("/v1/rewards", json={"rewards": [reward]}), 400, param, words)


def test_the_client_posts_by_request_and_by_group(client: RolloutClient) -> None:
    rollout = client.rollout(["a"], 4, 4, pruning=PRUNING, sampling_params={"min_tokens": 12})
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

"""Heads, reports and state go out and come back in; what does not fit is refused with both values."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest
from safetensors.numpy import load, save

from vllm_rollout import RolloutClient
from vllm_rollout.config import MAX_BODY_BYTES, MAX_STATE_BYTES
from vllm_rollout.group.types import HeadKey
from vllm_rollout.server.engine import HeadInfo
from vllm_rollout.server.learning.body import HEAD_HEADER

from .conftest import make_app
from .fake_engine import FakeEngine
from .fake_learning import HIDDEN_SIZE, MODEL, FakeLearning, succeeded
from .learning_steps import PRUNING, post, roll, teach
from .test_errors import check_error

pytestmark = pytest.mark.anyio

HEAD = "/v1/quality_head"
REPORT = "/v1/quality_head/report"
STATE = "/v1/rollouts/state"
HEAD_FIELDS = {
    "detection_length": 8, "hidden_size": HIDDEN_SIZE, "version": 3, "num_steps": 9, "num_labels": 90,
}  # fmt: skip
BYTES = {"content-type": "application/octet-stream"}


def head_file(model: str = MODEL, **changes: int) -> bytes:
    return FakeLearning.head_file(HeadInfo(**{**HEAD_FIELDS, **changes}), model)


async def test_before_the_first_rewards_there_is_neither_head_nor_report(http):
    for path in (HEAD, REPORT):
        check_error(await http.get(path), 404, "detection_length", ["Post rewards"])
        response = await http.get(path, params={"detection_length": 8})
        check_error(response, 404, "detection_length", ["for 8"])


async def test_a_trained_head_comes_as_safetensors_and_says_what_it_is_for(http, engine: FakeEngine):
    await teach(http)
    response = await http.get(HEAD)
    assert response.headers["content-type"] == "application/octet-stream"
    head = json.loads(response.headers[HEAD_HEADER])
    assert head["object"] == "quality_head"
    assert (head["detection_length"], head["hidden_size"], head["num_labels"]) == (8, HIDDEN_SIZE, 96)
    assert head["version"] == engine.learning.heads[HeadKey(8)].version > 0
    assert load(response.content).keys() == {"w1"}
    assert (await http.get(HEAD, params={"detection_length": 8})).headers[HEAD_HEADER] == response.headers[HEAD_HEADER]


async def test_a_head_that_is_put_in_place_scores_the_next_rollout(http):
    response = await http.put(HEAD, content=head_file(), headers=BYTES)
    assert response.status_code == 200, response.text
    assert response.json() == {"object": "quality_head", **HEAD_FIELDS, "adapter": ""}
    answer = await roll(http)
    assert {t.head_version for group in answer.groups for t in group.trajectories} == {3}


async def test_several_heads_have_to_be_named(http):
    await http.put(HEAD, content=head_file())
    await http.put(HEAD, content=head_file(detection_length=16))
    check_error(await http.get(HEAD), 409, "detection_length", ["8, 16"])
    head = json.loads((await http.get(HEAD, params={"detection_length": 16})).headers[HEAD_HEADER])
    assert head["detection_length"] == 16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 99}, ["hidden size 99", f"this server has {HIDDEN_SIZE}"]),
        ({"model": "other"}, ["model other", f"this server has {MODEL}"]),
    ],
)
async def test_a_head_of_another_model_is_a_409_with_both_values(http, engine: FakeEngine, changes, words):
    check_error(await http.put(HEAD, content=head_file(**changes)), 409, None, words)
    assert engine.learning.heads == {}


@pytest.mark.parametrize("content", [b"x", b"\xff" * 100, b'{"head": 1}', head_file()[:40], save({"w": np.zeros(2)})])
async def test_what_is_no_head_is_explained(http, engine: FakeEngine, content):
    check_error(await http.put(HEAD, content=content), 422, None, ["no quality head", "GET /v1/quality_head"])
    assert engine.learning.heads == {}


@pytest.mark.parametrize("path", [HEAD, STATE])
async def test_an_empty_body_is_explained(http, path):
    check_error(await http.put(path), 422, None, ["the body is empty", f"GET {path}", "application/octet-stream"])


@pytest.mark.parametrize("path", [HEAD, REPORT])
@pytest.mark.parametrize("length", ["-1", "4097", "1.5", "long", "", "9" * 5000])
async def test_a_detection_length_out_of_range_is_explained(http, path, length):
    response = await http.get(path, params={"detection_length": length})
    check_error(response, 422, "detection_length", [])


async def test_the_report_adds_up(http):
    await teach(http)
    report = (await http.get(REPORT)).json()
    assert report["detection_length"] == 8
    assert report["head"]["version"] == len(report["losses"]) > 0
    confidence, head = report["signals"]["confidence"], report["signals"]["head"]
    assert confidence["num_positive"] + confidence["num_negative"] == 96
    assert 0 < head["num_positive"] + head["num_negative"] < 96
    assert head["auc"] > 0.85
    assert 0 <= head["brier"] < 0.25
    assert len(head["bins"]) == 10
    assert sum(b["num_labels"] for b in head["bins"]) <= head["num_positive"] + head["num_negative"]
    assert (report["num_awaiting"], report["num_evicted"]) == (0, 0)
    assert report["active"]["num_pruned"] > 0


async def test_state_restores_what_was_learned_on_another_server(http):
    await teach(http)
    response = await http.get(STATE)
    assert response.headers["content-type"] == "application/octet-stream"
    app = make_app(FakeEngine())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://other") as other:
        assert "cold start" in (await roll(other)).warnings[0]
        put = await other.put(STATE, content=response.content, headers=BYTES)
        assert (put.status_code, put.content) == (204, b"")
        assert (await other.get(REPORT)).json()["signals"] == ((await http.get(REPORT)).json()["signals"])
        here, there = await roll(http), await roll(other)
        assert [g.trajectories for g in here.groups] == [g.trajectories for g in there.groups]
        assert there.usage.num_pruned == here.usage.num_pruned > 0


@pytest.mark.parametrize("content", [b"x", b"\x00" * 64, b"{}", b"[" * 100_000, b'{"model": "fake-model"}'])
async def test_what_is_no_state_is_explained_and_changes_nothing(http, content):
    await teach(http, 1)
    before = (await http.get(STATE)).content
    check_error(await http.put(STATE, content=content), 422, None, ["not a rollout state", f"GET {STATE}"])
    assert (await http.get(STATE)).content == before


async def test_a_state_of_another_model_is_a_409_with_both_values(http):
    state = (await http.get(STATE)).content.replace(MODEL.encode(), b"other")
    check_error(await http.put(STATE, content=state), 409, None, ["model other", f"this server has {MODEL}"])


async def test_a_state_may_be_larger_than_other_bodies_up_to_a_limit_of_its_own(http):
    large = b" " * (MAX_BODY_BYTES + 1)
    check_error(await http.put(STATE, content=large), 422, None, ["not a rollout state"])
    check_error(await http.put(HEAD, content=large), 413, None, [str(MAX_BODY_BYTES)])
    stated = {"content-length": str(MAX_STATE_BYTES + 1)}
    check_error(await http.put(STATE, content=b" ", headers=stated), 413, None, [str(MAX_STATE_BYTES), f"GET {STATE}"])


async def test_a_dead_engine_is_a_503(http, engine: FakeEngine):
    await teach(http, 1)
    state = (await http.get(STATE)).content
    engine.learning.dead = True
    for path in (HEAD, REPORT, STATE):
        check_error(await http.get(path), 503, None, ["restart the server"])
    for path, content in ((HEAD, b"x"), (STATE, state)):
        check_error(await http.put(path, content=content), 503, None, ["restart the server"])


def test_the_client_brings_heads_reports_and_state_back(client: RolloutClient, engine: FakeEngine):
    for seed in range(12):
        rollout = client.rollout(["a"], 4, 4, pruning=PRUNING, sampling={"min_tokens": 12, "seed": seed})
        rewards = [("0", t.index, succeeded(t.token_ids)) for t in rollout.groups[0].trajectories]
        client.post_rewards(rollout.id, rewards)
    head, report, state = client.quality_head(), client.report(8), client.state()
    assert head.head.version == report.head.version > 0
    assert report.signals["head"].auc > 0.5
    engine.learning.heads.clear()
    assert client.set_quality_head(head.weights) == head.head
    client.set_state(state)
    assert (client.quality_head(8).head, client.report()) == (head.head, report)


async def test_rewards_after_a_restart_are_a_404_and_say_so(http, engine: FakeEngine):
    answer = await roll(http)
    app = make_app(FakeEngine())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://restarted") as restarted:
        await restarted.put(STATE, content=(await http.get(STATE)).content)
        rewards = [{"prompt_id": "a", "index": 0, "reward": 1.0}]
        response = await restarted.post(f"/v1/rollouts/{answer.id}/rewards", json={"rewards": rewards})
        check_error(response, 404, None, ["before the next restart"])
    assert (await post(http, answer)).counts.accepted == 12

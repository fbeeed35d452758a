"""Refusals: a body that is no head or state, and a request without the admin key, if the server has one."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from safetensors.numpy import save

from tests.kernel.http.conftest import serving
from tests.kernel.http.fake_engine import FakeEngine
from tests.kernel.http.test_errors import check_error
from tests.parts.pruning.fakes import FakeLearning
from tests.parts.pruning.learning_steps import teach
from vllm_rollout import RolloutClient, RolloutError
from vllm_rollout.config import MAX_BODY_BYTES, MAX_STATE_BYTES
from vllm_rollout.kernel.http.admin import AdminKey
from vllm_rollout.kernel.http.clients import ADMIN_HEADER
from vllm_rollout.parts.pruning.rules.report import HeadInfo

HEAD = "/v1/quality_head"
REPORT = "/v1/quality_head/report"
STATE = "/v1/rollouts/state"
CUT = FakeLearning.head_file(HeadInfo(8, 16, 3, 9, 90))[:40]


OTHERS = {
    "a letter": b"x",
    "no text": b"\xff" * 100,
    "JSON": b'{"head": 1}',
    "a cut head": CUT,
    "other tensors": save({"w": np.zeros(2)}),
}


@pytest.mark.parametrize("content", OTHERS.values(), ids=OTHERS)
async def test_what_is_no_head_is_explained(http, engine: FakeEngine, content):
    check_error(await http.put(HEAD, content=content), 400, None, ["no quality head", "GET /v1/quality_head"])
    assert engine.part(FakeLearning).heads == {}


@pytest.mark.parametrize("path", [HEAD, STATE])
async def test_an_empty_body_is_explained(http, path):
    check_error(await http.put(path), 400, None, ["the body is empty", f"GET {path}", "application/octet-stream"])


@pytest.mark.parametrize("path", [HEAD, REPORT])
@pytest.mark.parametrize("length", ["-1", "4097", "1.5", "long", "", "9" * 5000])
async def test_a_detection_length_out_of_range_is_explained(http, path, length):
    response = await http.get(path, params={"detection_length": length})
    check_error(response, 400, "detection_length", [])


@pytest.mark.parametrize("content", [
    b"x", b"\x00" * 64, b"{}", b"[" * 100_000, b'{"model": "fake-model"}', b'{"format": 3, "runs": 10}\n[]',
    b'{"format": 3}\n[]', b'{"format": 3, "runs": 2}\n{}', b'{"format": 3, "runs": 2}\n[]',
    b'{"format": 4, "runs": 2}\n[]',
])  # fmt: skip
async def test_what_is_no_state_is_explained_and_changes_nothing(http, content):
    await teach(http, 1)
    before = (await http.get(STATE)).content
    check_error(await http.put(STATE, content=content), 400, None, ["not a rollout state", f"GET {STATE}"])
    assert (await http.get(STATE)).content == before


async def test_a_state_may_be_larger_than_other_bodies_up_to_a_limit_of_its_own(http):
    large = b" " * (MAX_BODY_BYTES + 1)
    check_error(await http.put(STATE, content=large), 400, None, ["not a rollout state"])
    check_error(await http.put(HEAD, content=large), 413, None, [str(MAX_BODY_BYTES)])
    stated = {"content-length": str(MAX_STATE_BYTES + 1)}
    check_error(await http.put(STATE, content=b" ", headers=stated), 413, None, [str(MAX_STATE_BYTES), f"GET {STATE}"])


async def test_a_dead_engine_is_a_503(http, engine: FakeEngine):
    await teach(http, 1)
    state = (await http.get(STATE)).content
    engine.dead = True
    rollout = {"prompts": [{"prompt": "a"}], "group_size": 4, "redundancy": "auto"}
    rewards = {"rewards": [{"prompt_id": "a", "index": 0, "reward": 1.0}]}
    answers = [await http.get(path) for path in (HEAD, REPORT, STATE, "/v1/rollouts/prompts")]
    answers += [await http.put(path, content=content) for path, content in ((HEAD, b"x"), (STATE, state))]
    answers += [await http.post("/v1/rollouts", json=rollout)]
    answers += [await http.post("/v1/rollouts/any/rewards", json=rewards)]
    for answer in answers:
        check_error(answer, 503, None, ["restart the server"])


KEY = "a long secret — ü"
PUTS = ("/v1/quality_head", "/v1/rollouts/state")


@pytest.fixture
def guarded(app: FastAPI) -> FastAPI:
    app.state.rollout_service.admin_key = AdminKey(KEY)
    return app


@pytest.mark.parametrize("path", PUTS)
@pytest.mark.parametrize(("sent", "said"), [({}, "missing"), ({ADMIN_HEADER: "wrong"}, "another key")])
async def test_a_put_without_the_key_is_refused(guarded, http: httpx.AsyncClient, path, sent, said):
    answer = await http.put(path, content=b"x" * 1000, headers=sent)
    assert answer.status_code == 401
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (ADMIN_HEADER, 401)
    for part in (said, "--rollout-admin-key", "admin_key"):
        assert part in error["message"]
    assert KEY not in answer.text
    assert "wrong" not in answer.text


@pytest.mark.parametrize("path", ["/v1/engines/0/drain", "/v1/engines/0/restore", "/v1/weights/recompute"])
async def test_ranks_are_emptied_by_whoever_has_the_key(guarded, engine: FakeEngine, http: httpx.AsyncClient, path):
    engine.num_ranks = 2
    assert (await http.post(path)).status_code == 401
    assert (await http.post(path, headers={ADMIN_HEADER: KEY.encode()})).status_code == 200
    assert (await http.get("/v1/engines")).status_code == 200


@pytest.mark.parametrize("path", PUTS)
async def test_with_the_key_it_is_the_body_that_counts(guarded, http: httpx.AsyncClient, path):
    answer = await http.put(path, content=b"no such thing", headers={ADMIN_HEADER: KEY.encode()})
    assert answer.status_code == 400


async def test_nothing_else_needs_the_key(guarded, http: httpx.AsyncClient):
    assert (await http.get("/v1/rollouts/state")).status_code == 200
    body = {"prompts": [{"prompt": "a"}], "group_size": 1}
    assert (await http.post("/v1/rollouts", json=body)).status_code == 200


async def test_the_key_is_not_shown(guarded, http: httpx.AsyncClient):
    key = AdminKey(KEY)
    assert str(key) == repr(key) == "***"
    assert KEY not in str(vars(key))
    assert KEY not in (await http.get("/metrics")).text


def test_our_client_sends_the_key(guarded):
    guarded.state.rollout_service.admin_key = AdminKey("plain")
    with serving(guarded) as url:
        with RolloutClient(url, admin_key="plain") as client:
            client.set_state(client.state())
        with RolloutClient(url) as client, pytest.raises(RolloutError) as raised:
            client.set_state(client.state())
        assert raised.value.status == 401

"""Heads and states are put by whoever has the admin key, where the server was given one."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from vllm_rollout import RolloutClient, RolloutError
from vllm_rollout.server.admin import AdminKey
from vllm_rollout.server.learning.body import ADMIN_HEADER

from .conftest import serving
from .fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

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


@pytest.mark.parametrize("path", ["/v1/engines/0/drain", "/v1/engines/0/restore"])
async def test_ranks_are_emptied_by_whoever_has_the_key(guarded, engine: FakeEngine, http: httpx.AsyncClient, path):
    engine.moves.num_ranks = 2
    assert (await http.post(path)).status_code == 401
    assert (await http.post(path, headers={ADMIN_HEADER: KEY.encode()})).status_code == 200
    assert (await http.get("/v1/engines")).status_code == 200


@pytest.mark.parametrize("path", PUTS)
async def test_with_the_key_it_is_the_body_that_counts(guarded, http: httpx.AsyncClient, path):
    answer = await http.put(path, content=b"no such thing", headers={ADMIN_HEADER: KEY.encode()})
    assert answer.status_code == 422


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

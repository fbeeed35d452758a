"""Ranks over HTTP."""

from __future__ import annotations

import httpx
import pytest

from .fake_engine import FakeEngine

pytestmark = pytest.mark.anyio


async def states(http: httpx.AsyncClient) -> list[str]:
    return [engine["state"] for engine in (await http.get("/v1/engines")).json()["engines"]]


async def test_a_rank_is_drained_and_restored(engine: FakeEngine, http: httpx.AsyncClient):
    engine.num_ranks = 3
    assert await states(http) == ["active"] * 3
    for _ in range(2):
        answer = await http.post("/v1/engines/1/drain")
        assert (answer.status_code, answer.json()["state"]) == (200, "drained")
    assert await states(http) == ["active", "drained", "active"]
    assert (await http.post("/v1/engines/0/drain", json={"timeout_s": 0.0})).status_code == 200
    assert (await http.post("/v1/engines/2/drain")).status_code == 409
    for _ in range(2):
        answer = await http.post("/v1/engines/1/restore")
        assert (answer.status_code, answer.json()["state"]) == (200, "active")
    assert await states(http) == ["drained", "active", "active"]


@pytest.mark.parametrize("action", ["drain", "restore"])
@pytest.mark.parametrize(("num_ranks", "allowed"), [(1, "only rank 0"), (4, "ranks 0 to 3")])
async def test_a_rank_that_is_not_there(engine: FakeEngine, http: httpx.AsyncClient, action, num_ranks, allowed):
    engine.num_ranks = num_ranks
    answer = await http.post(f"/v1/engines/4/{action}")
    assert answer.status_code == 404
    assert allowed in answer.json()["error"]["message"]


@pytest.mark.parametrize(("rank", "body", "param"), [
    ("-1", {}, "rank"), ("one", {}, "rank"), ("0", {"timeout_s": -1.0}, "timeout_s"),
    ("0", {"timeout_s": 1e9}, "timeout_s"), ("0", {"wait": True}, "wait"), ("0", {"timeout_s": "soon"}, "timeout_s"),
])  # fmt: skip
async def test_bad_input_is_named(engine: FakeEngine, http: httpx.AsyncClient, rank, body, param):
    engine.num_ranks = 2
    answer = await http.post(f"/v1/engines/{rank}/drain", json=body)
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == param
    assert await states(http) == ["active"] * 2

"""Ownership by API key: a client with another API key can neither read nor change an object that it can name."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from tests.kernel.http.conftest import http_of, make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.support.waiting import eventually
from vllm_rollout.kernel.http.clients import ClientNamespaces, namespace_of
from vllm_rollout.kernel.http.routes import router
from vllm_rollout.parts.page.http.plan import PageRollout
from vllm_rollout.parts.rounds.http.store import RunStore

pytestmark = pytest.mark.anyio

RUN = {"id": "a", "group_size": 2, "prompts_per_round": 2, "sampling_params": {"seed": 3}}
FEED = {"id": "f", "group_size": 2, "batch": 1, "max_staleness": 1}
PRUNING = {"detection_length": 4, "mode": "shadow"}
OF_ALL = {"rank", "path"}
"""Parameters that name nothing of a client's: an engine's rank, a file of the page."""


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "runs.sqlite"


@pytest.fixture
async def clients(database: Path) -> AsyncIterator[Callable[[str], httpx.AsyncClient]]:
    """Clients of one server, by API key. The empty key sends none."""
    app = make_app(FakeEngine(), database=database)
    app.add_middleware(ClientNamespaces)
    made: dict[str, httpx.AsyncClient] = {}

    def client(key: str) -> httpx.AsyncClient:
        made[key] = http_of(app)
        made[key].headers.update({"authorization": f"Bearer {key}"} if key else {})
        made[key].app = app
        return made[key]

    yield client
    for http in made.values():
        await http.aclose()
    for task in app.state.session_service._tasks:
        task.cancel()


def prompts(first: int, num: int) -> list[dict[str, str]]:
    return [{"id": f"q{i}", "prompt": f"{i}"} for i in range(first, first + num)]


async def posted(http: httpx.AsyncClient, path: str, body: Mapping[str, Any], status: int = 200) -> dict[str, Any]:
    response = await http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


async def everything(http: httpx.AsyncClient) -> dict[str, str]:
    """Names of all that a client may have, by the parameter of a path. One group of a rollout still runs."""
    await posted(http, "/v1/runs", RUN, 201)
    await posted(http, "/v1/runs/a/rounds", {"prompts": prompts(0, 3), "idempotency_key": "k"})
    group = await posted(http, "/v1/groups", {"id": "g", "group_size": 2}, 201)
    await posted(http, "/v1/feeds", FEED, 201)
    rollout = await posted(
        http, "/v1/rollouts",
        {"prompts": prompts(0, 1), "group_size": 2, "pruning": PRUNING, "sampling_params": {"min_tokens": 12}},
    )  # fmt: skip
    return {"run_id": "a", "number": "0", "group_id": group["id"], "session_id": group["to_begin"][0],
            "feed_id": "f", "rollout_id": rollout["id"], "position": "0"}  # fmt: skip


def paths(names: Mapping[str, str]) -> list[tuple[str, str]]:
    """Method and path of every route that names something of a client's."""
    found = []
    for route in router.routes:
        if isinstance(route, APIRoute) and (params := set(route.param_convertors) - OF_ALL):
            path = route.path_format.format(**{name: names[name] for name in params})
            found += [(method, path) for method in route.methods]
    return found


BODIES = {
    "rewards": {"rewards": [{"prompt_id": "q0", "index": 0, "reward": 1.0}]},
    "rounds": {"prompts": prompts(3, 3), "idempotency_key": "k"},
    "finish": {"reward": 1.0},
    "prompts": {"prompts": prompts(0, 1)},
    "batches": {"timeout_s": 1},
}
"""By the last word of a path."""


async def test_no_route_gives_a_client_what_another_has(clients: Callable[[str], httpx.AsyncClient]) -> None:
    mine, other = clients("mine"), clients("other")
    names = await everything(mine)
    for http in (other, clients("")):
        for method, path in paths(names):
            body = BODIES.get(path.rpartition("/")[2])
            response = await http.request(method, path, json=body)
            assert response.status_code == 404, (method, path, response.text)
    assert (await mine.get("/v1/runs/a")).json()["num_rounds"] == 1
    assert (await mine.get("/v1/groups/g")).status_code == 200
    path = f"/v1/rollouts/{names['rollout_id']}/rewards"
    assert (await posted(mine, path, BODIES["rewards"]))["counts"]["accepted"] == 1, "it had no reward before"


async def test_lists_and_states_have_what_is_the_clients_own(clients: Callable[[str], httpx.AsyncClient]) -> None:
    mine, other = clients("mine"), clients("other")
    await everything(mine)
    state, empty = (await mine.get("/v1/rollouts/state")).content, (await other.get("/v1/rollouts/state")).content
    assert b'"q0"' not in empty.split(b"\n")[1]
    assert (await other.get("/v1/runs")).json()["data"] == []
    await posted(other, "/v1/runs", {**RUN, "prompts_per_round": 4}, 201)
    assert (await other.put("/v1/rollouts/state", content=empty)).status_code == 204
    assert (await other.get("/v1/runs")).json()["data"] == []
    assert (await mine.get("/v1/runs/a")).json()["prompts_per_round"] == 2, "it is there, as it was"
    assert (await other.put("/v1/rollouts/state", content=state)).status_code == 204, "so runs go to another key"
    assert [run["id"] for run in (await other.get("/v1/runs")).json()["data"]] == ["a"]
    assert (await posted(mine, "/v1/runs/a/rounds", {"idempotency_key": "k"}))["idempotency_key"] == "k"
    again = await other.post("/v1/runs/a/rounds", json={"idempotency_key": "k"})
    assert again.status_code == 410, "the key was used, and answers are in no state"


async def test_groups_are_rewarded_by_their_own_client_only(clients: Callable[[str], httpx.AsyncClient]) -> None:
    mine, other = clients("mine"), clients("other")
    names = await everything(mine)
    reward = {"rewards": [{"group_id": f"{names['rollout_id']}-0", "index": 0, "reward": 1.0}]}
    forged = f"{namespace_of('Bearer mine')}/{names['rollout_id']}-0"
    for group_id in (reward["rewards"][0]["group_id"], forged):
        answer = await posted(other, "/v1/rewards", {"rewards": [{**reward["rewards"][0], "group_id": group_id}]})
        assert answer["counts"]["unknown"] == 1
    assert (await posted(mine, "/v1/rewards", reward))["counts"]["accepted"] == 1


async def test_a_round_that_filters_takes_rewards_of_its_own_client_only(clients, database: Path) -> None:
    mine, other = clients("mine"), clients("other")
    await posted(mine, "/v1/runs", {**RUN, "filter": "zero_variance"}, 201)
    body = {"prompts": prompts(0, 3), "stream": True}
    async with asyncio.timeout(30):
        streaming = asyncio.create_task(mine.post("/v1/runs/a/rounds", json=body))
        live = mine.app.state.run_service._live
        await eventually(lambda: any(each.rollout.outcome.started_s for each in live.values()))
        (rollout_id,) = live
        for path, reward in (
            (f"/v1/rollouts/{rollout_id}/rewards", {"prompt_id": "q0", "index": 0, "reward": 1.0}),
            ("/v1/rewards", {"group_id": f"{rollout_id}-0", "index": 0, "reward": 1.0}),
        ):
            response = await other.post(path, json={"rewards": [reward]})
            assert response.status_code == 404 or response.json()["counts"]["unknown"] == 1
        (page,) = (part for part in live[rollout_id].rollout.parts if isinstance(part, PageRollout))
        groups = page.watched.groups.values()
        assert all(candidate.reward is None for group in groups for candidate in group.candidates.values())
        streaming.cancel()
        await asyncio.gather(streaming, return_exceptions=True)


async def test_runs_of_before_there_was_a_key_are_the_first_keys(clients, database: Path) -> None:
    keyless = clients("")
    await everything(keyless)
    before = (await keyless.get("/v1/runs/a")).json()
    keyless.app.state.run_service._store.owner.close()
    app: FastAPI = make_app(FakeEngine())
    app.add_middleware(ClientNamespaces)
    store = RunStore(database, keyless=namespace_of("Bearer first"))
    app.state.run_service._store = store
    async with http_of(app) as http:
        http.headers["authorization"] = "Bearer first"
        assert (await http.get("/v1/runs/a")).json() == before
        assert (await posted(http, "/v1/runs/a/rounds", {"idempotency_key": "k"}))["idempotency_key"] == "k"
        http.headers["authorization"] = "Bearer second"
        assert (await http.get("/v1/runs/a")).status_code == 404
    with sqlite3.connect(database) as disk:
        assert disk.execute("SELECT COUNT(*) FROM keys WHERE instr(run, '/') = 0").fetchone() == (0,)

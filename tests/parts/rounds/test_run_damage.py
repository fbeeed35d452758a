"""Rows and files that nobody wrote so: they take nothing else with them, and the answer says how to go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.kernel.http.conftest import http_of, make_app
from tests.kernel.http.fake_engine import FakeEngine
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.parts.rounds.http.store import RunStore

TERMS = {
    "group_size": 2,
    "prompts_per_round": 2,
    "prompt_speculation": 1.5,
    "sampling_params": {"seed": 3},
    "resume": True,
}


@pytest.fixture
def store(http: httpx.AsyncClient) -> RunStore:
    return http._transport.app.state.run_service._store  # type: ignore[attr-defined]


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Two runs, each with a prompt that waits for its long round."""
    async with http_of(make_app(FakeEngine(), database=tmp_path / "runs.sqlite")) as http:
        for id in ("good", "bad"):
            assert (await http.post("/v1/runs", json={"id": id, **TERMS})).status_code == 201
            body = {"prompts": [{"id": f"q{i}", "prompt": f"{id} {i}"} for i in range(3)], "idempotency_key": "first"}
            assert (await http.post(f"/v1/runs/{id}/rounds", json=body)).status_code == 200
        service = http._transport.app.state.run_service  # type: ignore[attr-defined]
        await service._stored(lambda: None)  # behind what it still writes after an answer
        yield http


def message(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


@pytest.mark.parametrize(("column", "value"), [
    ("state", "no JSON"), ("state", "[]"), ("state", b"\xff\xfe"), ("state", "{}"), ("settings", "[" * 100_000),
    ("settings", "{}"), ("settings", '{"group_size": 7, "prompts_per_round": 2}'), ("model", b"\xff"), ("model", ""),
    ("created", "yesterday"), ("state", 17),
])  # fmt: skip
async def test_a_run_that_cannot_be_read_stands_in_nobodys_way(http, store, column, value):
    store._db.execute(f"UPDATE runs SET {column} = ?, owner = 'nobody' WHERE id = 'bad'", (value,))
    runs = (await http.get("/v1/runs")).json()
    assert [run["id"] for run in runs["data"]] == ["good"]
    (unreadable,) = runs["unreadable"]
    assert unreadable["id"] == "bad"
    for said in (unreadable["message"], message(await http.get("/v1/runs/bad"), 500)):
        assert "run 'bad' cannot be read from disk" in said
        assert "The prompts that wait in it are lost, unless a saved state has them" in said
        assert "DELETE the run" in said
    assert "cannot be read" in message(await http.post("/v1/runs/bad/rounds", json={"kind": "long"}), 500)
    state = await http.get("/v1/rollouts/state")
    async with http_of(make_app(FakeEngine())) as other:
        assert (await other.put("/v1/rollouts/state", content=state.content)).status_code == 204
        assert [run["id"] for run in (await other.get("/v1/runs")).json()["data"]] == ["good"]
    assert (await http.delete("/v1/runs/bad")).status_code == 204
    assert (await http.post("/v1/runs", json={"id": "bad", **TERMS})).status_code == 201
    assert (await http.get("/v1/runs/good")).json()["totals"]["num_prompts"] == 3


async def test_a_run_that_was_kept_before_there_were_rewards_is_made_again_on_the_same_terms(http, store):
    store._db.execute(
        "UPDATE runs SET settings = json_remove(settings, '$.reward', '$.max_candidates') WHERE id = 'bad'"
    )
    async with asyncio.timeout(10):
        assert (await http.post("/v1/runs", json={"id": "bad", **TERMS})).status_code == 200
        response = await http.post("/v1/runs", json={"id": "bad", **TERMS, "on_engine_failure": "retry"})
    assert "with on_engine_failure None, got 'retry'" in message(response, 409)


@pytest.mark.parametrize("id", [None, b"\xff"])
async def test_a_run_whose_name_cannot_be_read_leaves_with_the_next_state(http, store, id):
    state = (await http.get("/v1/rollouts/state")).content
    store._db.execute("UPDATE runs SET id = ?, state = 'garbage' WHERE id = 'bad'", (id,))
    assert (await http.get("/v1/runs")).json()["unreadable"][0]["id"] == repr(id)
    assert (await http.put("/v1/rollouts/state", content=state)).status_code == 204
    assert {run["id"] for run in (await http.get("/v1/runs")).json()["data"]} == {"good", "bad"}
    assert (await http.post("/v1/runs/bad/rounds", json={"kind": "long"})).status_code == 200


async def test_a_round_that_runs_protects_its_run_from_deletion_even_if_that_cannot_be_read(http, store):
    owner = f"{store.owner.name}.7"
    store._db.execute("UPDATE runs SET state = 'garbage', owner = ? WHERE id = 'bad'", (owner,))
    assert "a round of run 'bad' is running" in message(await http.delete("/v1/runs/bad"), 409)
    store.release("bad", owner)
    assert (await http.delete("/v1/runs/bad")).status_code == 204


@pytest.mark.parametrize("value", ["no JSON", '{"id": "another", "prompt": "x"}', '{"id": "q0"}', b"\xff", None])
async def test_a_prompt_that_cannot_be_read_is_named(http: httpx.AsyncClient, store: RunStore, value: object) -> None:
    if value is None:
        store._db.execute("DELETE FROM prompts WHERE run = 'bad'")
    else:
        store._db.execute("UPDATE prompts SET body = ? WHERE run = 'bad'", (value,))
    (waits,) = (await http.get("/v1/runs/bad")).json()["queue"]
    said = message(await http.post("/v1/runs/bad/rounds", json={"kind": "long"}), 500)
    assert f"prompt {waits!r} waits in run 'bad' and cannot be read from disk" in said
    assert "DELETE the run, make it again and hand in what GET /v1/runs/{id} says that waits" in said
    assert (await http.post("/v1/runs/good/rounds", json={"kind": "long"})).status_code == 200


@pytest.mark.parametrize("value", [b"garbage", "text", b""])
async def test_what_is_kept_of_a_prompt_and_cannot_be_read_starts_anew(http, store, value):
    store._db.execute("UPDATE prompts SET kept = ? WHERE run = 'bad'", (value,))
    answer = (await http.post("/v1/runs/bad/rounds", json={"kind": "long"})).json()
    assert any("starts anew: what is kept of it cannot be read from disk" in line for line in answer["warnings"])
    assert [len(group["trajectories"]) for group in answer["groups"]] == [2]
    assert answer["usage"]["resumed_tokens"] == 0


async def test_an_answer_that_cannot_be_read_is_gone(http: httpx.AsyncClient, store: RunStore) -> None:
    store._db.execute("UPDATE answers SET body = 'garbage' WHERE run = 'bad'")
    said = message(await http.post("/v1/runs/bad/rounds", json={"idempotency_key": "first"}), 410)
    assert "its answer is not kept any more" in said


async def test_a_round_whose_request_cannot_be_read_can_be_given_up(http: httpx.AsyncClient, store: RunStore) -> None:
    engine = http._transport.app.state.run_service.engine  # type: ignore[attr-defined]
    engine.dies_at_step = 0
    body = {"kind": "long", "idempotency_key": "second"}
    assert (await http.post("/v1/runs/bad/rounds", json=body)).status_code == 503
    engine.dies_at_step = None
    while (await http.get("/v1/runs/bad")).json()["open_round"]["state"] == "running":
        pass
    store._db.execute("UPDATE runs SET memo = '[]' WHERE id = 'bad'")
    said = message(await http.post("/v1/runs/bad/rounds", json={"idempotency_key": "second"}), 500)
    assert "DELETE /v1/runs/bad/rounds/1 puts them back" in said
    assert (await http.delete("/v1/runs/bad/rounds/1")).status_code == 200
    assert (await http.post("/v1/runs/bad/rounds", json={"kind": "long"})).status_code == 200


async def test_a_damaged_file_says_what_is_lost_and_how_to_go_on(http, store, tmp_path):
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    (page,) = store._db.execute("PRAGMA page_size").fetchone()
    store.owner.close()
    with (tmp_path / "runs.sqlite").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(page)
        file.write(b"\xff" * (size - page))  # all but the schema
    async with http_of(make_app(FakeEngine(), database=tmp_path / "runs.sqlite")) as damaged:
        for response in (await damaged.get("/v1/runs"), await damaged.post("/v1/runs", json={"id": "new", **TERMS})):
            said = message(response, 500)
            for words in ("is damaged", "What cannot be read is lost", "move the file away", "PUT your newest state"):
                assert words in said


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(RequestError, match=r"no database of runs .*What cannot be read is lost.* move the file away"):
        RunStore(tmp_path / "runs.sqlite")

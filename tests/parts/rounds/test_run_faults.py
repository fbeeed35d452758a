"""Runs whose database is full, locked or not theirs, and clients that leave at the wrong moment: nothing is lost."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from tests.kernel.http.conftest import http_of, make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.pruning.fakes import FakeLearning
from tests.support.waiting import WAIT_S, eventually
from vllm_rollout.parts.rounds.http import store as store_module
from vllm_rollout.parts.rounds.http.store import RunStore

pytestmark = pytest.mark.anyio

RUN = {"id": "a", "group_size": 2, "prompts_per_round": 4, "prompt_speculation": 1.5, "sampling_params": {"seed": 3}}
ROUND = {"prompts": [{"id": f"q{i}", "prompt": f"question {i}"} for i in range(6)], "idempotency_key": "k"}
IDS = {prompt["id"] for prompt in ROUND["prompts"]}


@pytest.fixture
def app(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    monkeypatch.setattr("vllm_rollout.private_database.BUSY_TIMEOUT_S", 0.0)
    return make_app(engine, database=tmp_path / "runs.sqlite")


@pytest.fixture
def store(app: FastAPI) -> RunStore:
    return app.state.run_service._store


@contextmanager
def full(store: RunStore) -> Iterator[None]:
    """No page more than it has, nor a free one."""

    def limit(num_pages: int) -> None:
        store._db.execute(f"PRAGMA max_page_count = {num_pages}")

    store._db.execute("VACUUM")
    limit(1)  # as many as there are: it never goes below
    try:
        yield
    finally:
        limit(1 << 30)


@contextmanager
def locked(store: RunStore) -> Iterator[None]:
    with closing(sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


FAULTS = pytest.mark.parametrize(("fault", "status", "words"), [
    (full, 507, "database or disk is full. Nothing was changed. Free space"),
    (locked, 503, "is locked by another process. Nothing was changed; try again"),
])  # fmt: skip


def check_refused(response: httpx.Response, status: int, words: str) -> None:
    assert response.status_code == status, response.text
    assert words in response.json()["error"]["message"]
    assert (response.headers.get("retry-after") is not None) == (status == 503)


def everybody(answer: dict) -> list[str]:
    """Prompts of a round, wherever they are now."""
    back = [group["prompt_id"] for group in answer["groups"]]
    return sorted([*back, *answer["filtered"], *answer["deferred"], *answer["unstarted"]])


BIG = {"include": ["text", "logprobs"], "sampling_params": {"seed": 3, "stop": ["x" * 40_000]}}
"""A run that needs pages of its own."""


@FAULTS
async def test_a_run_that_cannot_be_written_is_refused(http, store, fault, status: int, words: str) -> None:
    with fault(store):
        check_refused(await http.post("/v1/runs", json={**RUN, **BIG}), status, words)
        assert (await http.get("/v1/runs")).json()["data"] == []
    assert (await http.post("/v1/runs", json={**RUN, **BIG})).status_code == 201


@FAULTS
async def test_a_round_that_cannot_be_written_takes_nothing(http, store, engine, fault, status: int, words) -> None:
    await http.post("/v1/runs", json=RUN)
    before = (await http.get("/v1/runs/a")).json()
    prompts = [{**prompt, "prompt": prompt["prompt"] * 200} for prompt in ROUND["prompts"]]
    with fault(store):
        check_refused(await http.post("/v1/runs/a/rounds", json={**ROUND, "prompts": prompts}), status, words)
        assert (await http.get("/v1/runs/a")).json() == before
    assert engine.num_launched == 0
    answer = await http.post("/v1/runs/a/rounds", json={**ROUND, "prompts": prompts})
    assert everybody(answer.json()) == sorted(IDS)


@pytest.mark.parametrize("stream", [False, True])
@FAULTS
async def test_an_answer_that_cannot_be_written_is_written_when_its_key_is_repeated(
    http, store, engine, fault, status: int, words: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await http.post("/v1/runs", json={**RUN, "sampling_params": {"seed": 3, "min_tokens": 400}})
    close, active = store.close, [True]

    def faulty_close(*args, **kwargs):
        if not active[0]:
            return close(*args, **kwargs)
        with fault(store):
            return close(*args, **kwargs)

    monkeypatch.setattr(RunStore, "close", lambda self, *args, **kwargs: faulty_close(*args, **kwargs))
    body = {**ROUND, "stream": stream}
    response = await http.post("/v1/runs/a/rounds", json=body)
    if stream:
        assert "event: error" in response.text
        assert words in response.text
        assert "event: done" not in response.text
    else:
        check_refused(response, status, words)
    check_refused(await http.post("/v1/runs/a/rounds", json=body), status, words)
    run = (await http.get("/v1/runs/a")).json()
    assert set(run["open_round"]["prompt_ids"]) == IDS
    other = await http.post("/v1/runs/a/rounds", json={**ROUND, "idempotency_key": "another"})
    assert other.status_code == 409
    assert "'k'" in other.json()["error"]["message"]
    active[0] = False
    num_launched = engine.num_launched
    first = await http.post("/v1/runs/a/rounds", json=ROUND)
    assert everybody(first.json()) == sorted(IDS)
    assert (await http.post("/v1/runs/a/rounds", json=ROUND)).content == first.content
    assert engine.num_launched == num_launched
    assert (await http.get("/v1/runs/a")).json()["num_rounds"] == 1


async def test_a_client_that_leaves_while_its_answer_is_written_gets_it_later(
    app, http, store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await http.post("/v1/runs", json=RUN)
    writing, go_on = threading.Event(), threading.Event()
    close = RunStore.close

    def slow_close(self, *args, **kwargs):
        writing.set()
        assert go_on.wait(60)
        return close(self, *args, **kwargs)

    monkeypatch.setattr(RunStore, "close", slow_close)
    request = asyncio.create_task(http.post("/v1/runs/a/rounds", json=ROUND))
    await asyncio.to_thread(writing.wait, 60)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    again = asyncio.create_task(http.post("/v1/runs/a/rounds", json=ROUND))
    go_on.set()
    answer = await again
    assert everybody(answer.json()) == sorted(IDS)
    assert (await http.post("/v1/runs/a/rounds", json=ROUND)).content == answer.content
    assert (await http.get("/v1/runs/a")).json()["num_rounds"] == 1


async def test_a_key_that_was_answered_is_answered_again_while_another_round_is_written(
    app, http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by killing servers: the second of two trainers that share a run was refused the answer it had."""
    await http.post("/v1/runs", json={**RUN, "prompt_speculation": 1.0})
    first = {"prompts": [{"id": f"a{i}", "prompt": f"first {i}"} for i in range(4)], "idempotency_key": "one"}
    other = {"prompts": [{"id": f"b{i}", "prompt": f"other {i}"} for i in range(4)], "idempotency_key": "other"}
    answer = await http.post("/v1/runs/a/rounds", json=first)
    running = asyncio.create_task(
        http.post("/v1/runs/a/rounds", json={**other, "sampling_params": {"min_tokens": 400}})
    )
    async with asyncio.timeout(WAIT_S):
        while (await http.get("/v1/runs/a")).json()["open_round"] is None:
            await asyncio.sleep(0)
    go_on = threading.Event()
    read = RunStore.read

    def slow_read(self, id):
        found = read(self, id)
        assert go_on.wait(60)
        return found

    monkeypatch.setattr(RunStore, "read", slow_read)
    again = asyncio.create_task(http.post("/v1/runs/a/rounds", json=first))
    await eventually(lambda: app.state.run_service._unkept, every_s=0.01)
    go_on.set()
    assert (await again).content == answer.content
    assert (await running).status_code == 200


async def test_a_round_whose_end_could_not_be_written_is_no_longer_running(
    http, store, engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await http.post("/v1/runs", json=RUN)
    release, released = RunStore.release, asyncio.Event()
    loop = asyncio.get_running_loop()

    def faulty_release(self, id: str, owner: str) -> None:
        try:
            with locked(store):
                release(self, id, owner)
        finally:
            loop.call_soon_threadsafe(released.set)

    monkeypatch.setattr(RunStore, "release", faulty_release)
    engine.dies_at_step = 0
    response = await http.post("/v1/runs/a/rounds", json=ROUND)
    assert response.status_code == 503
    await released.wait()
    assert (await http.get("/v1/runs/a")).json()["open_round"]["state"] == "interrupted"
    engine.dies_at_step = None
    answer = await http.post("/v1/runs/a/rounds", json=ROUND)
    assert everybody(answer.json()) == sorted(IDS)


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "runs.sqlite")) as db:
        db.execute("PRAGMA user_version = 7")
    with pytest.raises(ValueError, match=r"is of version 7, this server reads version 2"):
        RunStore(tmp_path / "runs.sqlite")


def test_several_processes_may_open_a_new_database_at_once(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def opened(_: int) -> RunStore:
        barrier.wait()
        return RunStore(tmp_path / "runs.sqlite")

    with ThreadPoolExecutor(8) as threads:
        stores = list(threads.map(opened, range(8)))
    for store in stores:
        store.owner.close()


@FAULTS
async def test_a_state_that_cannot_be_written_is_not_taken_by_the_engine_either(
    http, engine, store, fault, status: int, words: str
) -> None:
    await http.post("/v1/runs", json={**RUN, **BIG})
    state = (await http.get("/v1/rollouts/state")).content
    await http.delete("/v1/runs/a")
    memory = engine.memories.base
    with fault(store):
        check_refused(await http.put("/v1/rollouts/state", content=state), status, words)
    assert engine.memories.base is memory
    assert [run.id for run in store.list()] == []
    assert (await http.put("/v1/rollouts/state", content=state)).status_code == 204
    assert (engine.memories.base is memory, [run.id for run in store.list()]) == (False, ["a"])


async def test_a_round_that_begins_while_a_state_is_looked_at_goes_on_and_nothing_changes(
    http, engine, store, monkeypatch
) -> None:
    await http.post("/v1/runs", json=RUN)
    state = (await http.get("/v1/rollouts/state")).content
    memory, look = engine.memories.base, FakeLearning.set_learning_state
    engine.step_s = 0.005

    async def slowly(self: FakeLearning, *args: object) -> None:
        nonlocal round
        round = asyncio.create_task(http.post("/v1/runs/a/rounds", json=ROUND))
        await eventually(lambda: engine.num_running, every_s=0.005)
        await look(self, *args)

    round: asyncio.Task
    monkeypatch.setattr(FakeLearning, "set_learning_state", slowly)
    response = await http.put("/v1/rollouts/state", content=state)
    assert (response.status_code, response.headers["retry-after"]) == (409, "1")
    assert engine.memories.base is memory
    assert len((await round).json()["groups"]) == 4


async def test_prompts_that_wait_take_a_bounded_number_of_bytes(http, store, monkeypatch) -> None:
    monkeypatch.setattr(store_module, "MAX_WAITING_BYTES", 1500)
    await http.post("/v1/runs", json=RUN)
    answer = (await http.post("/v1/runs/a/rounds", json=ROUND)).json()
    large = [{"id": f"r{i}", "prompt": "漢" * 80} for i in range(6)]
    response = await http.post("/v1/runs/a/rounds", json={"prompts": large})
    check_refused(response, 507, "at most 1500 may wait. Run long rounds, DELETE runs")
    assert (await http.get("/v1/runs/a")).json()["queue"] == answer["deferred"]
    monkeypatch.setattr(store_module, "MAX_WAITING_BYTES", 0)
    assert (await http.post("/v1/runs/a/rounds", json={"kind": "long"})).status_code == 200, "what waits may run"


async def test_a_round_after_a_kill_does_not_run_on_the_weights_of_the_start(tmp_path: Path) -> None:
    database = tmp_path / "runs.sqlite"
    before = make_app(FakeEngine(weight_version="step-7"), database=database)
    async with http_of(before) as http:
        await http.post("/v1/runs", json=RUN)
        assert (await http.post("/v1/runs/a/rounds", json=ROUND)).status_code == 200
    before.state.run_service._store.owner.close()
    engine = FakeEngine()
    async with http_of(make_app(engine, database=database)) as http:
        again = {"prompts": [{"id": f"r{i}", "prompt": f"question {i}"} for i in range(6)], "idempotency_key": "k2"}
        refused = await http.post("/v1/runs/a/rounds", json=again)
        check_refused(refused, 412, "the round before began under 'step-7'")
        assert engine.num_launched == 0
        assert (await http.post("/v1/runs/a/rounds", json=ROUND)).status_code == 200, "an answer that is kept"
        await http.post("/v1/runs", json={**RUN, "id": "other"})
        assert (await http.post("/v1/runs/other/rounds", json=ROUND)).status_code == 200, "it knew no weights before"
        engine.weight_version = "step-7"
        assert (await http.post("/v1/runs/a/rounds", json=again)).status_code == 200

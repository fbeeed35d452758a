"""Feeds on disk: a server that is killed, and the one after it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from tests.kernel.http.conftest import http_of, make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.feeds.test_feeds import TERMS, ids, look, make, put, take, update
from tests.parts.rewards.test_grading import FakeGraders
from tests.support.waiting import WAIT_S, eventually
from vllm_rollout.kernel.http.clients import ClientNamespaces, namespace_of
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.parts.feeds.http import kept
from vllm_rollout.parts.feeds.http.service import FeedService
from vllm_rollout.parts.feeds.http.store import TABLES, FeedStore
from vllm_rollout.parts.feeds.rules.feed import MAX_BYTES

Start = Callable[..., FastAPI]
"""Starts a server with an engine, and with settings for the fakes of parts."""


def wait_for_disk() -> None:
    """Return when all writes that feeds have begun are on disk."""
    kept._THREAD.submit(int).result(timeout=WAIT_S)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts a server with the same folder as the one before, which was killed after its last write."""

    def started(engine: FakeEngine, **settings: Any) -> FastAPI:
        app = make_app(engine, **settings)
        wait_for_disk()
        store = FeedStore(tmp_path / "feeds.sqlite")
        app.state.feed_service = FeedService(app.state.rollout_service, engine, Metrics(CollectorRegistry()), store)
        return app

    return started


async def complete(app: FastAPI, num: int) -> None:
    await eventually(lambda: len(app.state.feed_service._feeds["a"].feed.rule.complete) == num)


async def test_prompts_and_complete_groups_survive_a_kill(start: Start) -> None:
    engine = FakeEngine(weight_version="step-0", lengths={0: 3, 1: 5})
    app = start(engine)
    async with http_of(app) as http:
        await make(http)
        await put(http, 0, 9, idempotency_key="p")
        first = await take(http, idempotency_key="k0")
        update(app, engine, "step-1")
        await complete(app, 6)
        before = await look(http)
    after = FakeEngine()
    async with http_of(start(after)) as http:
        feed = await look(http)
        assert (feed["version"], feed["num_complete"], feed["num_batches"]) == (1, 6, 1)
        assert (feed["complete_bytes"], feed["waits_for"]) == (before["complete_bytes"], "trainer")
        assert await take(http, idempotency_key="k0") == first
        await put(http, 0, 9, idempotency_key="p")
        assert (await look(http))["num_waiting"] == 0
        batches = [await take(http, idempotency_key=f"k{i}") for i in (1, 2)]
        assert sorted(ids(first) + ids(batches[0]) + ids(batches[1])) == [f"q{i}" for i in range(9)]
        assert batches[0]["max_staleness"] == 1
        assert batches[0]["meter"]["trained"]["mean_tokens"] == 4
        assert after.num_launched == 0


async def test_groups_that_ran_run_again_once_the_weights_are_named(start: Start) -> None:
    engine = FakeEngine(weight_version="step-0", step_s=0.05, lengths={0: 400, 1: 400})
    async with http_of(start(engine)) as http:
        await make(http)
        await put(http, 0, 8)
        await eventually(lambda: engine.num_running == 12)
    after = FakeEngine()
    app = start(after)
    async with http_of(app) as http:
        error = await take(http, 504, timeout_s=0.05)
        assert "Give the newest weights again, under their old name 'step-0' to continue." in error["message"]
        assert after.num_launched == 0
        update(app, after, "step-0")
        batch = await take(http)
        assert (batch["version"], ids(batch)) == (0, sorted(ids(batch)))
        assert after.num_launched >= 6
        await http.delete("/v1/feeds/a")


async def test_a_server_without_the_feeds_reward_loses_no_prompt(start: Start, tmp_path: Path) -> None:
    terms: dict[str, Any] = {"reward": "even", "max_staleness": 0}
    async with http_of(start(FakeEngine(weight_version="step-0", step_s=60.0), graders=FakeGraders())) as http:
        await make(http, **terms)
        await put(http, 0, 9)
    app = start(FakeEngine(weight_version="step-0"))
    async with http_of(app) as http:
        response = await http.post("/v1/feeds", json={"id": "a", **TERMS, **terms})
        assert (response.status_code, response.json()["waits_for"]) == (200, "fields")
        assert "reward: must be one of none" in (await take(http, 409))["message"]
        feed = await look(http)
        assert (feed["num_waiting"], feed["totals"]["num_failed"]) == (9, 0)
    wait_for_disk()
    with sqlite3.connect(tmp_path / "feeds.sqlite") as disk:
        assert disk.execute("SELECT COUNT(*) FROM prompts").fetchone() == (9,)
    app = start(FakeEngine(weight_version="step-0"), graders=FakeGraders())
    async with http_of(app) as http:
        batch = await take(http)
        assert (ids(batch), batch["failed"]) == (["q0", "q1", "q2"], [])


async def test_a_deleted_feed_leaves_nothing(start: Start, tmp_path: Path) -> None:
    async with http_of(start(FakeEngine())) as http:
        await make(http)
        await put(http, 0, 5)
        await take(http)
        assert (await http.delete("/v1/feeds/a")).status_code == 204
    database = sqlite3.connect(tmp_path / "feeds.sqlite")
    for table in ("feeds", "prompts", "keys", "answers"):
        assert database.execute(f"SELECT COUNT(*) FROM {table}").fetchone() == (0,), table


async def test_a_disk_that_is_full_refuses_prompts_and_loses_no_batch(start: Start) -> None:
    app = start(FakeEngine())
    async with http_of(app) as http:
        await make(http)
        await put(http, 0, 6)
        await complete(app, 6)
        database = app.state.feed_service._store._database
        database.execute("PRAGMA query_only = ON")
        assert "cannot be written" in (await put(http, 6, 3, 507))["error"]["message"]
        assert (await http.post("/v1/feeds", json={"id": "b", "group_size": 2, "batch": 3})).status_code == 507
        assert (await http.get("/v1/feeds/a")).json()["max_complete_bytes"] == MAX_BYTES  # shared with no other feed
        await take(http, 507, idempotency_key="k0")
        await take(http, 507, idempotency_key="k0")
        database.execute("PRAGMA query_only = OFF")
        batch = await take(http, idempotency_key="k0")
        other = await take(http)
        assert sorted(ids(batch) + ids(other)) == [f"q{i}" for i in range(6)]


def test_a_file_that_is_no_database_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "feeds.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(RuntimeError, match="cannot be used for feeds"):
        FeedStore(tmp_path / "feeds.sqlite")


async def test_a_client_finds_its_feed_again_and_its_groups_are_its_own(start: Start) -> None:
    mine = {"Authorization": "Bearer mine"}
    before = start(FakeEngine())
    before.add_middleware(ClientNamespaces)
    async with http_of(before) as http:
        http.headers.update(mine)
        await make(http)
        await put(http, 0, 8)
    after = start(FakeEngine())
    after.add_middleware(ClientNamespaces)
    async with http_of(after) as http:
        assert (await http.get("/v1/feeds/a")).status_code == 404
        http.headers.update(mine)
        seen, prepare = [], after.state.rollout_service.prepare

        async def noted(request):
            rollout = await prepare(request)
            seen.append(rollout.namespace)
            return rollout

        after.state.rollout_service.prepare = noted
        assert len((await take(http))["groups"]) == 3
        assert set(seen) == {namespace_of("Bearer mine")}


async def test_feeds_of_before_there_was_a_key_are_the_first_keys(start: Start, tmp_path: Path) -> None:
    async with http_of(start(FakeEngine())) as http:
        await make(http)
        await put(http, 0, 8)
        first = await take(http, idempotency_key="k")
    wait_for_disk()
    FeedStore(tmp_path / "feeds.sqlite", keyless=namespace_of("Bearer mine"))
    after = start(FakeEngine())
    after.add_middleware(ClientNamespaces)
    async with http_of(after) as http:
        assert (await http.get("/v1/feeds/a")).status_code == 404
        http.headers["Authorization"] = "Bearer mine"
        assert await take(http, idempotency_key="k") == first
        await put(http, 8, 1)
        assert (await http.delete("/v1/feeds/a")).status_code == 204
    with sqlite3.connect(tmp_path / "feeds.sqlite") as disk:
        assert [disk.execute(f"SELECT COUNT(*) FROM {table}").fetchone() for table in ("feeds", *TABLES)] == [(0,)] * 4


async def test_deferred_prompts_wait_again_after_a_kill(start: Start) -> None:
    engine = FakeEngine(weight_version="step-0", step_s=0.01, lengths={0: 400, 1: 400})
    app = start(engine)
    async with http_of(app) as http:
        await make(http, batch=2, max_staleness=0, on_stale="defer")
        await put(http, 0, 3)
        await eventually(lambda: engine.num_running == 4)
        update(app, engine, "step-1")
        seen = await look(http)
        assert seen["num_deferred"] + seen["num_waiting"] + seen["num_running"] == 3
    async with http_of(start(after := FakeEngine())) as http:
        assert (await look(http))["num_waiting"] == 3
        after.weight_version = "step-1"
        assert ids(await take(http)) == ["q0", "q1"]

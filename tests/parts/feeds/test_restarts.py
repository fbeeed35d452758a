"""Feeds on disk: a server that is killed, and the one after it."""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from tests.kernel.http.conftest import http_of, make_app, serving
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.feeds.test_feeds import TERMS, ids, look, make, put, take, update
from tests.parts.rewards.test_grading import FakeGraders
from tests.support.waiting import WAIT_S, eventually, wait_until
from vllm_rollout import RolloutClient, RolloutError
from vllm_rollout.kernel.http.clients import ClientNamespaces, namespace_of
from vllm_rollout.kernel.http.engine import RequestError
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


async def kill(app: FastAPI) -> None:
    """Let the server's feed write nothing more, and end."""
    wait_for_disk()
    (feed,) = app.state.feed_service.live
    feed.kept.store = None
    await feed.close()


def fill_disk(app: FastAPI, is_full: bool = True) -> None:
    app.state.feed_service._store._database.execute(f"PRAGMA query_only = {is_full:d}")


async def complete(app: FastAPI, num: int) -> None:
    await eventually(lambda: len(app.state.feed_service._feeds["a"].feed.rule.complete) == num)


async def refused_batch(app: FastAPI, http: httpx.AsyncClient, **fields: str) -> dict[str, Any]:
    """The error of a request for a complete batch that met a full disk, which then has room again."""
    await complete(app, 3)
    wait_for_disk()
    fill_disk(app)
    error: dict[str, Any] = await take(http, 507, **fields)
    fill_disk(app, False)
    return error


def assert_nothing_is_left(folder: Path) -> None:
    with sqlite3.connect(folder / "feeds.sqlite") as disk:
        for table in ("feeds", *TABLES):
            assert disk.execute(f"SELECT COUNT(*) FROM {table}").fetchone() == (0,), table


async def test_prompts_and_complete_groups_survive_a_kill(start: Start) -> None:
    engine = FakeEngine(weight_version="step-0", lengths={0: 3, 1: 5})
    app = start(engine)
    async with http_of(app) as http:
        await make(http)
        await put(http, 0, 9, idempotency_key="p")
        first = await take(http, idempotency_key="k0")
        await update(app, engine, "step-1")
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
        await update(app, after, "step-0")
        batch = await take(http)
        assert (batch["version"], ids(batch)) == (0, sorted(ids(batch)))
        assert after.num_launched >= 6
        await http.delete("/v1/feeds/a")


async def test_other_weights_after_a_restart_are_an_update(start: Start) -> None:
    engine = FakeEngine(weight_version="step-0", lengths={0: 3, 1: 5})
    app = start(engine)
    async with http_of(app) as http:
        await make(http, on_stale="drop")
        await put(http, 0, 9)
        await complete(app, 6)
    await kill(app)
    after = FakeEngine()
    app = start(after)
    async with http_of(app) as http:
        await update(app, after, "step-7")
        batch = await take(http)
        assert (batch["version"], {group["staleness"] for group in batch["groups"]}) == (1, {1})
        await update(app, after, "step-8")  # the three groups of before that are left are too old now
        batch = await take(http)
        assert (batch["version"], len(batch["dropped"]), sorted(ids(batch))) == (2, 3, ["q6", "q7", "q8"])


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
    assert_nothing_is_left(tmp_path)


async def test_a_disk_that_is_full_refuses_prompts_and_loses_no_batch(start: Start) -> None:
    app = start(FakeEngine())
    async with http_of(app) as http:
        await make(http)
        await put(http, 0, 6)
        await complete(app, 6)
        fill_disk(app)
        assert "cannot be written" in (await put(http, 6, 3, 507))["error"]["message"]
        assert (await http.post("/v1/feeds", json={"id": "b", "group_size": 2, "batch": 3})).status_code == 507
        assert (await http.get("/v1/feeds/a")).json()["max_complete_bytes"] == MAX_BYTES  # shared with no other feed
        await take(http, 507, idempotency_key="k0")
        await take(http, 507, idempotency_key="k0")
        fill_disk(app, False)
        batch = await take(http, idempotency_key="k0")
        other = await take(http)
        assert sorted(ids(batch) + ids(other)) == [f"q{i}" for i in range(6)]


async def test_numbers_come_to_the_disk_after_the_batch_that_they_count(start: Start) -> None:
    engine = FakeEngine(weight_version="step-0")
    app = start(engine)
    async with http_of(app) as http:
        await make(http, max_staleness=0)
        await put(http, 0, 9)
        await refused_batch(app, http, idempotency_key="k0")
        await update(app, engine, "step-1")
        await kill(app)
    async with http_of(app := start(FakeEngine(weight_version="step-1"))) as http:
        batch = await take(http, idempotency_key="k0")
        assert (batch["batch"], batch["version"], ids(batch)) == (0, 0, ["q0", "q1", "q2"])
        batch = await take(http)
        assert (batch["batch"], batch["version"], batch["max_staleness"]) == (1, 1, 0)
        assert ids(batch) == ["q3", "q4", "q5"]


@pytest.mark.parametrize("is_full", [False, True])
async def test_prompts_that_left_before_a_kill_are_in_one_list_of_one_batch(start: Start, is_full: bool) -> None:
    engine = FakeEngine(weight_version="step-0", step_s=0.02, lengths={0: 400, 1: 400})
    app = start(engine)
    async with http_of(app) as http:
        await make(http, on_stale="drop", max_staleness=0)
        bad = {"prompts": [{"id": "bad", "prompt_token_ids": [5000]}]}
        await http.post("/v1/feeds/a/prompts", json=bad)
        await put(http, 0, 3)
        await eventually(lambda: engine.num_running == 6)
        fill_disk(app, is_full)
        await update(app, engine, "step-1")  # drops three
        wait_for_disk()
        fill_disk(app, False)
        await update(app, engine, "step-2")
        await kill(app)
    after = FakeEngine(weight_version="step-2")
    for i in range(2):
        async with http_of(app := start(after)) as http:
            batch = await take(http, drain=True, idempotency_key=f"k{i}")
            left = (batch["dropped"], [each["prompt_id"] for each in batch["failed"]], batch["num_waiting"], ids(batch))
            assert left == (([], [], 0, []) if i else (["q0", "q1", "q2"], ["bad"], 0, []))
            assert i or "out of vocabulary" in batch["failed"][0]["reason"]
            await kill(app)


async def test_a_feed_of_before_names_and_digests_were_kept_is_read(start: Start, tmp_path: Path) -> None:
    async with http_of(app := start(FakeEngine(weight_version="step-0"))) as http:
        await make(http)
        await put(http, 0, 3, idempotency_key="p")
        await kill(app)
    with sqlite3.connect(tmp_path / "feeds.sqlite") as disk:
        disk.execute("UPDATE feeds SET state = json_remove(state, '$.since')")
        disk.execute("DROP TABLE digests")
    async with http_of(start(FakeEngine(weight_version="step-0"))) as http:
        assert (await put(http, 3, 3, idempotency_key="p"))["totals"]["num_put"] == 3
        assert ids(await take(http)) == ["q0", "q1", "q2"]


async def test_the_key_of_other_prompts_is_refused_also_after_a_kill(start: Start) -> None:
    for is_first in (True, False):
        async with http_of(app := start(FakeEngine(weight_version="step-0"))) as http:
            if is_first:
                await make(http)
            assert (await put(http, 0, 3, idempotency_key="epoch"))["totals"]["num_put"] == 3
            error = (await put(http, 3, 3, 409, idempotency_key="epoch"))["error"]
            assert error["param"] == "idempotency_key"
            assert "'epoch' has put other prompts" in error["message"]
            await kill(app)


async def test_a_feed_that_could_not_be_deleted_is_as_it_was(start: Start) -> None:
    app = start(FakeEngine())
    async with http_of(app) as http:
        await make(http)
        await put(http, 0, 6)
        await complete(app, 6)
        before = await look(http)
        wait_for_disk()
        fill_disk(app)
        assert (await http.delete("/v1/feeds/a")).status_code == 507
        assert await look(http) == before
        fill_disk(app, False)
        assert len(ids(await take(http))) == 3
        assert (await http.delete("/v1/feeds/a")).status_code == 204
        await make(http)
        assert (await look(http))["num_complete"] == 0


def test_a_feed_takes_the_place_of_what_is_left_of_another(tmp_path: Path) -> None:
    store = FeedStore(tmp_path / "feeds.sqlite")
    store.create("a", 0, "model", {}, {})
    store.put("a", "key", "digest", [(0, "{}")])
    store.create("a", 1, "model", {}, {})
    (feed,) = store.load()
    assert (feed.created, [*feed.prompts], [*feed.puts]) == (1, [], [])


async def test_nothing_of_a_deleted_feed_is_written_into_another_one_of_its_name(start: Start) -> None:
    app = start(engine := FakeEngine())
    async with http_of(app) as http:
        await make(http)
        await put(http, 0, 3)
        await complete(app, 3)
        (before,) = app.state.feed_service.live
        assert (await http.delete("/v1/feeds/a")).status_code == 204
        engine.step_s = 60
        await make(http)
        await put(http, 0, 3)
        before.kept.completed(before.groups[0])
        wait_for_disk()
    (stored,) = app.state.feed_service._store.load()
    assert [each.born for each in stored.prompts] == [None, None, None]


async def test_nothing_is_written_of_a_feed_that_is_being_deleted(start: Start, tmp_path: Path) -> None:
    app = start(FakeEngine())
    async with http_of(app) as http:
        await make(http)
        await put(http, 0, 3)
        await refused_batch(app, http)
        store, kept = app.state.feed_service._store, app.state.feed_service.live[0].kept
        store.delete("a")
        kept.left([], {})
        wait_for_disk()
    assert_nothing_is_left(tmp_path)


def test_the_end_of_a_block_warns_of_a_feed_that_it_could_not_delete(start: Start) -> None:
    app = start(FakeEngine())
    with serving(app) as url, RolloutClient(url) as client:
        with pytest.warns(UserWarning, match="feed 'a' is there still.*507"), client.feed(2, 3, id="a") as feed:
            fill_disk(app)
        with pytest.raises(KeyError), warnings.catch_warnings(action="error"), feed:
            raise KeyError
        fill_disk(app, False)
        with feed:
            assert feed.refresh().num_batches == 0
        with pytest.raises(RolloutError, match="404"):
            feed.refresh()


def test_a_batch_that_met_a_full_disk_comes_from_the_next_call(start: Start) -> None:
    app = start(FakeEngine())
    with serving(app) as url, RolloutClient(url) as client, client.feed(2, 3) as feed:
        feed.put(map(str, range(6)))
        wait_until(lambda: feed.refresh().num_complete == 6)
        wait_for_disk()
        fill_disk(app)
        for _ in range(2):
            with pytest.raises(RolloutError, match="Its idempotency_key is 'batch-") as full:
                feed.batch()
            assert full.value.status == 507
        fill_disk(app, False)
        seen = [group.prompt_id for batch in feed for group in batch.groups]
        assert sorted(seen) == [str(i) for i in range(6)]


async def test_a_batch_that_a_request_without_a_key_took_comes_by_the_key_of_its_error(start: Start) -> None:
    app = start(FakeEngine())
    async with http_of(app) as http:
        await make(http)
        await put(http, 0, 3)
        error = await refused_batch(app, http)
        _, key, _ = error["message"].rsplit("'", 2)
        assert ids(await take(http, idempotency_key=key)) == ["q0", "q1", "q2"]


async def test_a_batch_may_be_larger_than_what_the_database_takes_in_a_row(start: Start, monkeypatch) -> None:
    monkeypatch.setattr("vllm_rollout.parts.feeds.http.store.MAX_BLOB", 500)
    app = start(FakeEngine())
    app.state.feed_service._store._database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2000)
    async with http_of(app) as http:
        await make(http, batch=40)
        await put(http, 0, 120)
        batches = [await take(http, idempotency_key=f"k{i}") for i in range(2)]
        assert (await take(http, idempotency_key="k1")) == batches[1]
        await kill(app)
    async with http_of(start(FakeEngine())) as http:
        assert [await take(http, idempotency_key=f"k{i}") for i in range(2)] == batches
        assert (await http.delete("/v1/feeds/a")).status_code == 204


@pytest.mark.parametrize("error", [OverflowError("BLOB longer than INT_MAX bytes"), sqlite3.DataError("too big")])
def test_a_value_that_the_database_does_not_take_is_no_fault_of_ours(tmp_path: Path, error: Exception) -> None:
    store = FeedStore(tmp_path / "feeds.sqlite")
    with pytest.raises(RequestError, match="cannot be written") as refused, store._transaction():
        raise error
    assert refused.value.status == 507


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("settings = json_set(settings, '$.on_update', 'stop')", 'on_update: "stop" needs the part rounds'),
        ("state = json_remove(state, '$.version')", "KeyError('version')"),
        ("state = json_set(state, '$.since.newer', 1)", "unexpected keyword argument 'newer'"),
    ],
)
async def test_a_feed_that_cannot_be_read_names_the_file_and_the_remedy(
    start: Start, tmp_path: Path, monkeypatch, damage: str, reason: str
) -> None:
    async with http_of(app := start(FakeEngine())) as http:
        await make(http)
        await kill(app)
    with sqlite3.connect(tmp_path / "feeds.sqlite") as disk:
        disk.execute(f"UPDATE feeds SET {damage}")
    monkeypatch.setattr("vllm_rollout.parts.feeds.http.body.face", lambda *names: None)
    with pytest.raises(RuntimeError) as refused:
        start(FakeEngine())
    message = str(refused.value)
    assert message.startswith(f"{tmp_path / 'feeds.sqlite'}: feed 'a' cannot be read")
    assert reason in message
    assert message.endswith("If a part of the server is left out, start with it. Else move the file away.")
    assert "pydantic" not in message


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
        assert (await http.get("/v1/feeds")).json()["data"] == []
        http.headers.update(mine)
        assert [feed["id"] for feed in (await http.get("/v1/feeds")).json()["data"]] == ["a"]
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
    assert_nothing_is_left(tmp_path)


async def test_deferred_prompts_wait_again_after_a_kill(start: Start) -> None:
    engine = FakeEngine(weight_version="step-0", step_s=0.01, lengths={0: 400, 1: 400})
    app = start(engine)
    async with http_of(app) as http:
        await make(http, batch=2, max_staleness=0, on_stale="defer")
        await put(http, 0, 3)
        await eventually(lambda: engine.num_running == 4)
        await update(app, engine, "step-1")
        seen = await look(http)
        assert seen["num_deferred"] + seen["num_waiting"] + seen["num_running"] == 3
    async with http_of(start(after := FakeEngine())) as http:
        assert (await look(http))["num_waiting"] == 3
        after.weight_version = "step-1"
        assert ids(await take(http)) == ["q0", "q1"]


@pytest.mark.parametrize("restarts", [False, True])
async def test_groups_keep_the_order_of_their_births(start: Start, restarts: bool) -> None:
    engine = FakeEngine(weight_version="step-0", lengths={0: 3, 1: 3})
    app = start(engine)
    refuses = True
    async with http_of(app) as http:
        await make(http, batch=1, max_staleness=2)
        (feed,) = app.state.feed_service.live
        run = feed.runner.run

        async def runs(number: int, group: Any) -> None:
            if group.prompt.id == "q0" and refuses:
                raise RequestError("the engine is paused.", status=503, retry_after_s=0.01)
            await run(number, group)

        feed.runner.run = runs
        await put(http, 0, 3)
        await complete(app, 2)
        await update(app, engine, "step-1")
        refuses = False
        await complete(app, 3)
        if restarts:
            await kill(app)
            app = start(engine)
        async with http_of(app) as after:
            seen = []
            for step in (2, 3, 4):
                batch = await take(after)
                assert batch["dropped"] == []
                seen += [(group["prompt_id"], group["born"], group["staleness"]) for group in batch["groups"]]
                await update(app, engine, f"step-{step}")
    assert seen == [("q1", 0, 1), ("q2", 0, 2), ("q0", 1, 2)]


async def test_a_disk_that_was_full_at_an_update_breaks_no_bound(start: Start) -> None:
    """The disk has taken later groups, but not the numbers of the update before them."""
    engine = FakeEngine(weight_version="step-0", lengths={0: 3, 1: 3})
    app = start(engine)
    async with http_of(app) as http:
        await make(http, batch=2)
        await put(http, 0, 6)
        await complete(app, 4)
        await take(http)
        wait_for_disk()
        fill_disk(app)
        await update(app, engine, "step-1")
        wait_for_disk()
        fill_disk(app, False)
        await complete(app, 4)
        await kill(app)
    app = start(engine)
    async with http_of(app) as http:
        ages = [[group["staleness"] for group in (await take(http))["groups"]] for _ in range(2)]
    assert ages == [[1, 1], [0, 0]]


async def test_a_full_disk_at_an_update_without_a_batch_gives_no_more_places(start: Start) -> None:
    engine = FakeEngine(weight_version="step-0", lengths={0: 3, 1: 3})
    app = start(engine)
    async with http_of(app) as http:
        await make(http, batch=2)
        await put(http, 0, 2)
        await complete(app, 2)
        wait_for_disk()
        fill_disk(app)
        await update(app, engine, "step-1")
        wait_for_disk()
        fill_disk(app, False)
        await put(http, 2, 2)
        await complete(app, 4)
        before = await look(http)
        await kill(app)
    async with http_of(start(engine)) as http:
        after = await look(http)
    assert (before["version"], before["capacity"]) == (after["version"], after["capacity"]) == (1, 0)


@pytest.mark.parametrize("num_complete", [0, 2])
async def test_a_group_that_was_deferred_on_a_full_disk_begins_anew(start: Start, num_complete: int) -> None:
    """`num_complete`: groups that have completed after that. Later writes forget none of them."""
    engine = FakeEngine(weight_version="step-0", lengths={0: 3, 1: 3})
    app = start(engine)
    async with http_of(app) as http:
        await make(http, batch=2, max_staleness=0, on_stale="defer")
        await put(http, 0, 2)
        await complete(app, 2)
        wait_for_disk()
        (feed,) = app.state.feed_service.live
        feed.runner.is_ready = False
        fill_disk(app)
        await update(app, engine, "step-1")
        wait_for_disk()
        fill_disk(app, False)
        if num_complete:
            feed.runner.is_ready = True
            feed.admit()
            await complete(app, num_complete)
        feed.kept.left([], feed.state)  # as at any later event
        await kill(app)
    app = start(FakeEngine(weight_version="step-1", lengths={0: 3, 1: 3}))
    async with http_of(app) as http:
        assert (await look(http))["num_complete"] == num_complete
        assert [(group["born"], group["staleness"]) for group in (await take(http))["groups"]] == [(1, 0), (1, 0)]


async def test_no_more_keys_are_on_disk_than_in_memory(start: Start, monkeypatch) -> None:
    monkeypatch.setattr("vllm_rollout.parts.feeds.http.store.MAX_NAMES", 5)
    app = start(engine := FakeEngine(weight_version="0"))
    async with http_of(app) as http:
        await make(http, batch=1)
        for number in range(9):
            await put(http, number, 1, idempotency_key=f"p{number}")
            await take(http, idempotency_key=f"k{number}")
            await update(app, engine, str(number + 1))
        assert await take(http, idempotency_key="k8")
    wait_for_disk()
    (stored,) = app.state.feed_service._store.load()
    assert [*stored.puts] == [f"p{number}" for number in range(4, 9)]
    assert stored.keys == [f"k{number}" for number in range(4, 9)]
    disk = app.state.feed_service._store._database
    assert disk.execute("SELECT count(*) FROM digests").fetchone() == (5,)

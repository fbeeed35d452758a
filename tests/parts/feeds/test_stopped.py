"""Feeds whose groups stop at a weights update, and go on from their tokens."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.kernel.http.conftest import http_of, make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.feeds.test_feeds import TERMS, ids, look, make, prompts, put, take, update
from tests.parts.feeds.test_restarts import Start, start, wait_for_disk  # noqa: F401
from tests.parts.pruning.learning_steps import PRUNING, teach
from tests.parts.rewards.test_grading import FakeGraders
from tests.support.waiting import eventually
from vllm_rollout.kernel.rules.types import NOT_FINITE
from vllm_rollout.parts.feeds.http.live import MAX_STARTS, LiveFeed
from vllm_rollout.parts.rounds.http import kept as kept_module
from vllm_rollout.parts.rounds.http import resumed as resumed_module

LONG = {0: 60, 1: 60}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(weight_version="step-0", step_s=0.005, lengths=LONG)


def feed_of(app: Any) -> LiveFeed:
    (feed,) = app.state.feed_service.live
    return feed


async def have_tokens(engine: FakeEngine, num_candidates: int, num_tokens: int = 3) -> None:
    """Wait until this many candidates run and each has some new tokens."""
    await eventually(
        lambda: sum(each.num_tokens >= num_tokens for each in engine.candidates.values()) == num_candidates
    )


async def stop_and_go_on(app: Any, engine: FakeEngine, name: str) -> None:
    """Update the weights, and wait until all groups that ran go on."""
    feed = feed_of(app)
    before = {number: feed.groups[number] for number in feed.rule.running}
    await update(app, engine, name)

    def go_on() -> bool:
        after = [feed.groups[number] for number in before]
        return all(group.group_id for group in after) and not {*before.values()} & {*after}

    await eventually(go_on)


def check_spans(trajectory: dict[str, Any], *versions: str) -> None:
    """Assert that spans of these versions, and of no other, cover all tokens."""
    spans = trajectory["weight_versions"]
    assert [span["version"] for span in spans] == list(versions) or not versions
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    assert spans[-1]["end"] == trajectory["num_tokens"]


def by_prompt(batch: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {group["prompt_id"]: group["trajectories"] for group in batch["groups"]}


async def plain(http: httpx.AsyncClient, count: int, **fields: Any) -> dict[str, list[dict[str, Any]]]:
    """Trajectories of a rollout without a feed, by prompt."""
    body = {"prompts": prompts(0, count), "group_size": 2, "sampling_params": TERMS["sampling_params"], **fields}
    return by_prompt((await http.post("/v1/rollouts", json=body)).json())


async def test_a_stopped_group_becomes_what_it_would_have_become_at_once(app, http, engine) -> None:
    await make(http, on_update="stop")
    await put(http, 0, 3)
    await have_tokens(engine, 6)
    await stop_and_go_on(app, engine, "step-1")
    batch = await take(http)
    expected = await plain(http, 3)
    assert (batch["version"], batch["warnings"], batch["failed"]) == (1, [], [])
    for group in batch["groups"]:
        assert (group["born"], group["born_version"], group["staleness"]) == (0, "step-0", 1)
        for ours, theirs in zip(group["trajectories"], expected[group["prompt_id"]], strict=True):
            num = ours["num_resumed_tokens"]
            assert 3 <= num < 60
            assert all(ours[name] == theirs[name] for name in ("index", "token_ids", "logprobs", "finish_reason"))
            check_spans(ours, "step-0", "step-1")
            assert (ours["weight_versions"][0]["end"], ours["off_policy"]) == (num - 1, True)
    totals = (await look(http))["totals"]
    assert (totals["generated_tokens"], totals["wasted_tokens"]) == (3 * 2 * 60, 0)


async def test_updates_in_a_row_leave_a_span_each(app, http, engine) -> None:
    await make(http, on_update="stop", max_staleness=8, batch=1)
    await put(http, 0, 1)
    for step in range(1, 4):
        await have_tokens(engine, 2)
        await stop_and_go_on(app, engine, f"step-{step}")
    await have_tokens(engine, 2)
    await update(app, engine, "step-4")
    await update(app, engine, "step-5")  # at once: it goes on under the newest
    batch = await take(http)
    for trajectory in batch["groups"][0]["trajectories"]:
        check_spans(trajectory, "step-0", "step-1", "step-2", "step-3", "step-5")
        assert trajectory["num_tokens"] == len(trajectory["logprobs"]) == 60


async def test_a_group_that_goes_on_starts_before_younger_ones(app, http, engine) -> None:
    prepare, seen = app.state.rollout_service.prepare, []

    async def noted(request: Any) -> Any:
        seen.append((request.prompts[0].id, request.priority))
        return await prepare(request)

    app.state.rollout_service.prepare = noted
    await make(http, on_update="stop", max_staleness=8, batch=1)
    for step in range(1, 3):
        await put(http, step, 1)
        await have_tokens(engine, 2 * step)
        await stop_and_go_on(app, engine, f"step-{step}")
    assert sorted(seen[1:]) == [("q1", -2), ("q1", -1), ("q1", 0), ("q2", -1), ("q2", 0)]


async def test_a_race_goes_on(app, http, engine) -> None:
    engine.lengths = {0: 8, 1: 60, 2: 20, 3: 60}
    await make(http, on_update="stop", redundancy=2, batch=1)
    await put(http, 0, 1)
    await have_tokens(engine, 3, 12)  # the first one has finished
    before = engine.num_launched
    await update(app, engine, "step-1")
    await eventually(lambda: engine.num_launched == before + 3)
    (group,) = (await take(http))["groups"]
    assert [(each["index"], each["num_tokens"]) for each in group["trajectories"]] == [(0, 8), (2, 20)]
    assert {(each["index"], each["state"]) for each in group["candidates"]} == {(1, "surplus"), (3, "surplus")}
    assert all(each["num_tokens"] < 40 for each in group["candidates"])
    assert [each["num_resumed_tokens"] == each["num_tokens"] for each in group["trajectories"]] == [True, False]


async def test_a_group_that_waits_for_all_its_candidates_still_does(app, http, engine) -> None:
    engine.lengths = {0: 8, 1: 8, 2: 60, 3: 60}
    await make(http, on_update="stop", redundancy=2, batch=1, early_stop=False)
    await put(http, 0, 1)
    await have_tokens(engine, 2, 12)
    await stop_and_go_on(app, engine, "step-1")
    (group,) = (await take(http))["groups"]
    ends = [(each["index"], each["num_tokens"]) for name in ("trajectories", "candidates") for each in group[name]]
    assert ends == [(0, 8), (1, 8), (2, 60), (3, 60)]


async def test_pruned_candidates_stay_out(app, http, engine) -> None:
    engine.step_s, engine.lengths = 0.0, {}
    await teach(http)
    engine.step_s, engine.lengths = 0.005, dict.fromkeys(range(6), 60)
    await make(http, on_update="stop", redundancy=4, batch=1, pruning={**PRUNING, "keep_ratio": 0.5})
    await put(http, 0, 1)
    length = PRUNING["detection_length"]
    await eventually(lambda: max((each.num_tokens for each in engine.candidates.values()), default=0) >= length + 3)
    before, survivors = engine.num_launched, engine.num_running
    assert 2 <= survivors < 6
    await stop_and_go_on(app, engine, "step-1")
    (group,) = (await take(http))["groups"]
    assert (group["status"], engine.num_launched) == ("complete", before + survivors)
    for each in group["trajectories"]:
        assert (0 < each["survival_probability"] < 1, each["num_tokens"]) == (True, 60)
        check_spans(each, "step-0", "step-1")


async def test_finished_candidates_are_graded_again(engine) -> None:
    engine.lengths = {0: 8, 1: 61}
    app = make_app(engine, graders=FakeGraders())
    async with http_of(app) as http:
        await make(http, on_update="stop", batch=1, reward="even", filter="zero_variance")
        await put(http, 0, 1)
        await have_tokens(engine, 1, 12)
        await stop_and_go_on(app, engine, "step-1")
        (group,) = (await take(http))["groups"]
        assert [each["reward"] for each in group["trajectories"]] == [1.0, 0.0]


async def test_groups_wait_while_a_batch_is_complete_and_hold_their_places(app, http, engine) -> None:
    await make(http, on_update="stop")
    engine.lengths = {0: 2, 1: 2}
    await put(http, 0, 3)
    await eventually(lambda: len(feed_of(app).rule.complete) == 3)
    engine.lengths = LONG
    await put(http, 3, 6)
    await have_tokens(engine, 6)
    complete_bytes = (await look(http))["complete_bytes"]
    await update(app, engine, "step-1")
    await eventually(lambda: len(feed_of(app).stopped) == 3)
    seen = await look(http)
    assert seen["complete_bytes"] > complete_bytes, "output of stopped groups is counted too"
    assert (seen["num_running"], seen["num_stopped"], seen["waits_for"]) == (3, 3, "trainer")
    assert (seen["num_waiting"], seen["capacity"], engine.num_running) == (3, 0, 0)
    assert ids(await take(http)) == ["q0", "q1", "q2"]
    assert (await look(http))["num_stopped"] == 0
    batch = await take(http)
    assert ids(batch) == ["q3", "q4", "q5"]
    assert all(each["num_resumed_tokens"] for group in batch["groups"] for each in group["trajectories"])


async def test_a_feed_that_stopped_groups_fill_lets_prompts_wait_again(engine, monkeypatch) -> None:
    monkeypatch.setattr("vllm_rollout.parts.feeds.http.service.MAX_BYTES", 1)
    engine.num_launch_places = 6
    app = make_app(engine)
    async with http_of(app) as http:
        await make(http, on_update="stop", max_staleness=3)
        await put(http, 0, 12)
        await have_tokens(engine, 6)
        await update(app, engine, "step-1")
        await eventually(lambda: feed_of(app).rule.is_full)
        seen = await look(http)
        assert seen["num_running"] <= 6  # three were stopped, and the next three had begun
        assert seen["num_running"] + seen["num_waiting"] == 12
        batches = [await take(http, drain=True) for _ in range(4)]
    assert sorted(each for batch in batches for each in ids(batch)) == sorted(f"q{i}" for i in range(12))
    assert "no more groups start before batches are taken" in batches[0]["warnings"][0]


async def test_a_stopped_group_that_a_batch_waits_for_goes_on(app, http, engine) -> None:
    await make(http, on_update="stop", batch=1, max_staleness=2)
    await put(http, 0, 1)
    await have_tokens(engine, 2)
    await stop_and_go_on(app, engine, "step-1")
    engine.lengths = {0: 2, 1: 2}
    await put(http, 1, 1)
    await eventually(lambda: len(feed_of(app).rule.complete) == 1)
    engine.lengths = LONG
    await stop_and_go_on(app, engine, "step-2")  # q0 must be in the next batch
    assert (await look(http))["waits_for"] == "older_groups"
    assert ids(await take(http)) == ["q0"]


async def test_tokens_survive_weights_that_are_not_finite(app, http, engine) -> None:
    await make(http, on_update="stop", batch=1, max_staleness=4)
    await put(http, 0, 1)
    await have_tokens(engine, 2)
    await stop_and_go_on(app, engine, "step-1")
    kept = feed_of(app).groups[0].before
    for each in engine.candidates.values():
        each.end_reason, each.token_ids = "failed", each.token_ids[: each.num_tokens + 1]
    engine.failures, engine.error = {0: 59, 1: 59}, NOT_FINITE
    await update(app, engine, "bad-2")
    assert "weights with a new name" in (await take(http, 504, timeout_s=1))["message"]
    seen = await look(http)
    assert (seen["num_running"], seen["num_stopped"], seen["num_waiting"]) == (1, 1, 0)
    assert feed_of(app).groups[0].before is kept
    engine.failures = {}
    await update(app, engine, "step-2")
    batch = await take(http)
    assert "NaN or infinite" in batch["warnings"][0]
    for trajectory in batch["groups"][0]["trajectories"]:
        check_spans(trajectory, "step-0", "step-1", "step-2")
        assert 0 < trajectory["num_resumed_tokens"] < 60 == trajectory["num_tokens"]


async def test_a_group_that_the_engine_cannot_take_keeps_its_tokens(app, http, engine, monkeypatch) -> None:
    monkeypatch.setattr("vllm_rollout.parts.feeds.http.live.AGAIN_S", 0.01)
    await make(http, on_update="stop", batch=1)
    await put(http, 0, 1)
    await have_tokens(engine, 2)
    await update(app, engine, "step-1")
    await eventually(lambda: any(group.before for group in feed_of(app).groups.values()))
    engine.dies_at_step = 0
    await asyncio.sleep(0.1)
    engine.dies_at_step = None
    (group,) = (await take(http))["groups"]
    assert all(each["num_resumed_tokens"] for each in group["trajectories"])


async def test_stopped_groups_that_are_too_old_are_dropped_with_their_tokens(app, http, engine) -> None:
    await make(http, on_update="stop", on_stale="drop", batch=1, max_staleness=0)
    await put(http, 0, 1)
    await have_tokens(engine, 2)
    await update(app, engine, "step-1")
    await eventually(lambda: engine.is_idle)
    batch = await take(http, drain=True)
    assert (batch["dropped"], batch["groups"]) == (["q0"], [])
    totals = (await look(http))["totals"]
    assert totals["generated_tokens"] == totals["wasted_tokens"] > 0


async def test_a_feed_is_deleted_with_its_stopped_groups(app, http, engine) -> None:
    await make(http, on_update="stop")
    await put(http, 0, 6)
    await have_tokens(engine, 12)
    await update(app, engine, "step-1")
    assert (await http.delete("/v1/feeds/a")).status_code == 204
    assert (engine.num_running, engine.groups) == (0, {})


@pytest.mark.parametrize("go_on", [False, True])
async def test_a_feed_that_is_closed_while_it_fills_starts_no_more_groups(app, http, engine, go_on) -> None:
    num = 2 * MAX_STARTS
    await make(http, on_update="stop", batch=num)
    (feed,) = app.state.feed_service.live
    feed.runner.is_ready = go_on
    await put(http, 0, num)
    if go_on:
        await have_tokens(engine, 2 * num)
        feed.runner.is_ready = False
        await update(app, engine, "step-1")
        await eventually(lambda: len(feed.stopped) == num)
    feed.runner.is_ready = True
    feed.admit()
    assert feed._admits_more is not None
    await feed.close()
    await eventually(lambda: feed._admits_more is None)
    assert not feed._tasks


async def test_what_cannot_go_on_is_refused(http) -> None:
    body = {"id": "a", **TERMS, "on_update": "stop", "sampling_params": {"stop": "x"}}
    error = (await http.post("/v1/feeds", json=body)).json()["error"]
    assert (error["param"], error["message"]) == ("on_update", 'on_update: "stop" not with sampling_params.stop')


async def test_stopping_is_refused_without_rounds(http, monkeypatch) -> None:
    monkeypatch.setattr("vllm_rollout.parts.feeds.http.body.face", lambda *_: None)
    error = (await http.post("/v1/feeds", json={"id": "a", **TERMS, "on_update": "stop"})).json()["error"]
    assert (error["param"], "needs the part rounds" in error["message"]) == ("on_update", True)


async def test_a_group_with_too_many_tokens_to_keep_runs_again(app, http, engine, monkeypatch) -> None:
    await make(http, on_update="stop", batch=1)
    await put(http, 0, 1)
    await have_tokens(engine, 2)
    monkeypatch.setattr(kept_module, "MAX_KEPT_BYTES", 1)
    await update(app, engine, "step-1")
    await eventually(lambda: engine.num_launched == 4)
    batch = await take(http)
    assert "has more than" in batch["warnings"][0] or "have more than" in batch["warnings"][0]
    assert (batch["groups"][0]["staleness"], batch["groups"][0]["trajectories"][0]["num_resumed_tokens"]) == (0, 0)


async def test_a_group_with_too_many_tokens_to_keep_goes_on_from_those_of_its_last_stop(
    app, http, engine, monkeypatch
) -> None:
    await make(http, on_update="stop", batch=1, max_staleness=4)
    await put(http, 0, 1)
    await have_tokens(engine, 2)
    await stop_and_go_on(app, engine, "step-1")
    kept = feed_of(app).groups[0].before
    await have_tokens(engine, 2)
    monkeypatch.setattr(resumed_module, "keep", lambda *_: None)
    await stop_and_go_on(app, engine, "step-2")
    assert feed_of(app).groups[0].before is kept
    batch = await take(http)
    assert "goes on from its earlier tokens" in batch["warnings"][0]
    totals = (await look(http))["totals"]
    assert totals["generated_tokens"] - totals["wasted_tokens"] == 2 * 60


async def test_groups_go_on_after_a_kill(start: Start, engine) -> None:  # noqa: F811
    app = start(engine)
    async with http_of(app) as http:
        await make(http, on_update="stop")
        await put(http, 0, 3)
        await have_tokens(engine, 6)
        await stop_and_go_on(app, engine, "step-1")
        await have_tokens(engine, 6)  # what they have now is lost
        engine.step_s = 60.0  # none ends before the kill
        await put(http, 3, 3)
    after = FakeEngine(weight_version=None, lengths=LONG)
    app = start(after)
    async with http_of(app) as http:
        seen = await look(http)
        assert (seen["num_running"], seen["num_stopped"], seen["num_waiting"]) == (3, 3, 3)
        assert (seen["waits_for"], after.num_launched) == ("weights", 0)
        assert seen["meter"]["running"]["mean_tokens"] >= 3
        await update(app, after, "step-1")  # the version of before goes on
        batch = await take(http)
        assert (batch["version"], ids(batch), batch["max_staleness"]) == (1, ["q0", "q1", "q2"], 1)
        for group in batch["groups"]:
            assert group["born_version"] == "step-0"
            for each in group["trajectories"]:
                check_spans(each, "step-0", "step-1")
                assert each["weight_versions"][0]["end"] == each["num_resumed_tokens"] - 1
        again = await take(http)
        assert [each["num_resumed_tokens"] for each in again["groups"][0]["trajectories"]] == [0, 0]


async def test_what_is_kept_and_damaged_runs_again(start: Start, engine) -> None:  # noqa: F811
    app = start(engine)
    async with http_of(app) as http:
        await make(http, on_update="stop", batch=1)
        await put(http, 0, 1)
        await have_tokens(engine, 2)
        await stop_and_go_on(app, engine, "step-1")
        wait_for_disk()
        app.state.feed_service._store._database.execute("UPDATE prompts SET kept = x'00'").connection.commit()
    app = start(after := FakeEngine())
    async with http_of(app) as http:
        await update(app, after, "step-1")
        batch = await take(http)
        assert "starts anew" in batch["warnings"][0]
        assert (ids(batch), batch["groups"][0]["trajectories"][0]["num_resumed_tokens"]) == (["q0"], 0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("on_stale", ["wait", "drop", "finish", "defer"])
async def test_no_order_of_updates_and_batches_loses_a_prompt_or_a_token(app, http, engine, seed, on_stale) -> None:
    chance = random.Random(f"{seed}/{on_stale}")
    engine.step_s, engine.lengths = 0.001, {}
    await make(http, on_update="stop", on_stale=on_stale, redundancy=1, batch=2, max_staleness=chance.randint(0, 2))
    await put(http, 0, 16)
    expected = await plain(http, 16, group_size=3)
    seen: list[str] = []
    step = 0
    while len(seen) < 16:
        await asyncio.sleep(chance.random() * 0.03)
        if chance.random() < 0.6:
            await update(app, engine, f"step-{(step := step + 1)}")
        if chance.random() < 0.5:
            await update(app, engine, f"step-{(step := step + 1)}")
            batch = await take(http, drain=True)
            seen += ids(batch) + batch["dropped"]
            for prompt_id, trajectories in by_prompt(batch).items():
                whole = {each["index"]: each["token_ids"] for each in expected[prompt_id]}
                for each in trajectories:
                    assert each["token_ids"] == whole[each["index"]]
                    check_spans(each)
    assert sorted(seen) == sorted(f"q{i}" for i in range(16))
    await eventually(lambda: not feed_of(app)._tasks)
    totals = (await look(http))["totals"]
    returned = totals["generated_tokens"] - totals["wasted_tokens"]
    assert returned == feed_of(app).meter.shares["trained"].tokens.sum * 2


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("on_stale", ["finish", "defer"])
async def test_no_kill_loses_a_prompt_or_returns_it_twice(start: Start, seed, on_stale) -> None:  # noqa: F811
    chance = random.Random(f"{seed}/{on_stale}")
    seen: list[str] = []
    step, is_new = 0, True
    while len(seen) < 12:
        engine = FakeEngine(step_s=0.001, weight_version="step-0" if is_new else None)
        app = start(engine)
        async with http_of(app) as http:
            if is_new:
                await make(http, on_update="stop", redundancy=1, batch=2, on_stale=on_stale)
                await put(http, 0, 12)
            expected, is_new = await plain(http, 12, group_size=3), False
            for _ in range(chance.randint(2, 6)):
                await update(app, engine, f"step-{(step := step + 1)}")
                await asyncio.sleep(chance.random() * 0.03)
                if chance.random() < 0.4 and len(seen) < 12:
                    batch = await take(http, drain=True)
                    seen += ids(batch)
                    for prompt_id, trajectories in by_prompt(batch).items():
                        whole = {each["index"]: each["token_ids"] for each in expected[prompt_id]}
                        for each in trajectories:
                            assert each["token_ids"] == whole[each["index"]]
                            check_spans(each)
            feed = feed_of(app)
            feed.kept.store = None  # killed: nothing is written any more
            await feed.close()
    assert sorted(seen) == sorted(f"q{i}" for i in range(12))


@pytest.mark.parametrize("redundancy", [0, 1])
async def test_a_stop_keeps_no_group_whose_logits_were_not_finite(app, http, engine, redundancy) -> None:
    """One of its candidates had logits that are not finite, and the update stops the others."""
    engine.lengths = dict.fromkeys(range(3), 60)
    await make(http, on_update="stop", batch=1, max_staleness=8, redundancy=redundancy)
    engine.failures, engine.error = {0: 10}, NOT_FINITE
    await put(http, 0, 1)
    await have_tokens(engine, 1 + redundancy, 12)
    engine.failures = {}
    await update(app, engine, "step-1")
    batch = await take(http)
    assert (ids(batch), batch["failed"]) == (["q0"], [])
    assert {span["version"] for t in batch["groups"][0]["trajectories"] for span in t["weight_versions"]} == {"step-1"}


async def test_stopped_groups_go_on_a_few_at_a_time() -> None:
    engine = FakeEngine(weight_version="step-0", num_launch_places=1000)
    app = make_app(engine)
    http = http_of(app)
    await make(http, on_update="stop", batch=1, max_staleness=99)
    await put(http, 0, 1)
    await eventually(lambda: feed_of(app).rule.complete)
    engine.step_s, engine.lengths = 0.2, LONG
    await put(http, 1, 99)
    await have_tokens(engine, 198)
    await update(app, engine, "step-1")
    feed = feed_of(app)
    await eventually(lambda: len(feed.stopped) == 99)
    begun, turn, start_group = Counter(), 0, feed._start

    def noted(number: int) -> None:
        begun[turn] += 1
        start_group(number)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    feed._start = noted
    counting = asyncio.create_task(count_turns())
    await take(http)
    await eventually(lambda: begun.total() >= 99)
    counting.cancel()
    assert max(begun.values()) <= 2 * MAX_STARTS

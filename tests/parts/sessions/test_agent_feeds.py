"""Feeds whose candidates are sessions: agents run them, in one process or in several."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.kernel.http.conftest import http_of
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.feeds.test_feeds import make, put, take
from tests.parts.feeds.test_restarts import wait_for_disk
from tests.parts.sessions.test_agents import FAST, LONG, USER
from tests.parts.sessions.turns import Turns
from tests.support.waiting import WAIT_S, eventually
from vllm_rollout import AgentSession, AsyncFeed, AsyncRolloutClient, RolloutError, Void
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.rules.request_names import names_of_group
from vllm_rollout.parts.feeds.http.answers import FeedBatch
from vllm_rollout.parts.feeds.http.live import LiveFeed
from vllm_rollout.parts.feeds.http.service import FeedService
from vllm_rollout.parts.feeds.http.store import FeedStore
from vllm_rollout.parts.feeds.with_sessions.http import harnesses


@asynccontextmanager
async def feed_at(url: str, batch: int = 2, group_size: int = 2, **fields: Any) -> AsyncIterator[AsyncFeed]:
    """A feed of sessions, which is deleted at the end. Nothing of its client goes on."""
    before = asyncio.all_tasks()
    terms = {"group_size": group_size, "batch": batch, "id": "a", "sessions": {}, **fields}
    async with asyncio.timeout(WAIT_S), AsyncRolloutClient(url, **FAST) as client, client.feed(**terms) as feed:
        yield feed
    assert asyncio.all_tasks() == before


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"id": f"q{i}", "prompt": f"question {i}", "data": i} for i in range(count)]


def ids(*batches: FeedBatch) -> list[str]:
    return sorted(group.prompt_id for batch in batches for group in batch.groups)


def live(turns: Turns) -> LiveFeed:
    (feed,) = turns.app.state.feed_service.live
    return feed


def update(turns: Turns, name: str) -> None:
    """New weights under this name. The server's thread sees it when it looks."""
    turns.app.state.rollout_service.engine.weight_version = name


async def two_turns(session: AgentSession) -> float:
    answer = await session.chat([USER])
    await session.chat([USER, answer["choices"][0]["message"], {"role": "tool", "content": "42"}])
    return float(session.number)


async def test_a_trainer_gets_batches_of_trajectories_while_agents_race(url, turns) -> None:
    lost = []

    async def run(session: AgentSession) -> float:
        if session.number == 2:
            try:
                await session.chat([LONG])
            finally:
                lost.append(session.prompt["id"])
        return await two_turns(session)

    async with feed_at(url, redundancy=1) as feed, feed.agents(run):
        await feed.put(prompts(5))
        batches = []
        async for batch in feed:
            batches.append(batch)
            update(turns, f"step-{len(batches)}")
        assert ([len(batch.groups) for batch in batches], ids(*batches)) == ([2, 2, 1], [f"q{i}" for i in range(5)])
        for group in (group for batch in batches for group in batch.groups):
            assert (group.status, group.born in range(3)) == ("complete", True)
            assert {"id": group.prompt_id, **group.prompt} == prompts(5)[group.prompt["data"]]
            ends = sorted((each.reward, each.state, each.num_tokens) for each in group.trajectories)
            assert ends == [(0.0, "finished", 10), (1.0, "finished", 10)]
            assert [each.state for each in group.sessions] == ["surplus"]
            assert all(sum(segment.mask) == 10 for each in group.trajectories for segment in each.segments)
        totals = (await feed.refresh()).totals
        assert (totals.num_taken, totals.generated_tokens, totals.wasted_tokens) == (5, 5 * 22, 5 * 2)
        assert batches[-1].meter.trained.mean_reward == 0.5
    assert sorted(lost) == [f"q{i}" for i in range(5)]


async def test_nothing_starts_before_a_harness_comes(url, turns) -> None:
    async with feed_at(url) as feed:
        await feed.put(prompts(2))
        with pytest.raises(RolloutError, match=r"no harness runs its sessions.*/v1/feeds/a/events") as refused:
            await feed.batch(timeout_s=0.1)
        assert refused.value.status == 504
        before = await feed.refresh()
        assert (before.waits_for, before.num_waiting, before.num_harnesses) == ("harness", 2, 0)
        async with feed.agents(two_turns):
            assert ids(await feed.batch()) == ["q0", "q1"]
            assert (await feed.refresh()).num_harnesses == 1


async def test_turns_of_older_groups_come_first(url, turns) -> None:
    updated = asyncio.Event()

    async def run(session: AgentSession) -> float:
        await session.chat([USER])
        await updated.wait()
        (group,) = (each for each in turns.service._groups.values() if session.id in each.declared)
        return float(group.priority())

    async with feed_at(url) as feed, feed.agents(run):
        await feed.put(prompts(1))
        await eventually(lambda: any(each.declared for each in turns.service._groups.values()))
        update(turns, "step-1")
        await feed.put([{"id": "younger", "messages": [USER]}])
        updated.set()
        groups = (await feed.batch()).groups
        assert [(group.born, [each.reward for each in group.trajectories]) for group in groups] == [
            (0, [-1.0, -1.0]),
            (1, [0.0, 0.0]),
        ]


async def test_harnesses_share_the_groups_and_one_that_goes_loses_its_own(url, turns, monkeypatch) -> None:
    monkeypatch.setattr(harnesses, "AWAY_S", 0.05)
    monkeypatch.setattr(harnesses, "TICK_S", 0.05)
    runs: Counter[tuple[str, str]] = Counter()
    both = asyncio.Event()

    def agent(name: str) -> Any:
        async def run(session: AgentSession) -> float:
            runs[name, session.prompt["id"]] += 1
            await both.wait()
            if name == "leaves":
                await asyncio.Event().wait()
            return await two_turns(session)

        return run

    async with feed_at(url, batch=4) as feed:
        async with feed.agents(agent("stays")):
            async with feed.agents(agent("leaves")):
                await eventually(lambda: live(turns).runner.num_harnesses == 2, 0.01)
                await feed.put(prompts(4))
                await eventually(lambda: sum(runs.values()) == 8, 0.01)
                both.set()
                theirs = {prompt for name, prompt in runs if name == "leaves"}
            assert len(theirs) == 2
            batch = await feed.batch()
        assert (ids(batch), batch.failed) == (["q0", "q1", "q2", "q3"], [])
        assert {prompt: runs["stays", prompt] for prompt in theirs} == dict.fromkeys(theirs, 2)


async def test_a_harness_whose_stream_breaks_keeps_its_groups(url, turns) -> None:
    calls: Counter[str] = Counter()
    goes_on = asyncio.Event()

    async def run(session: AgentSession) -> float:
        calls[session.id] += 1
        await goes_on.wait()
        return await two_turns(session)

    async with feed_at(url) as feed, feed.agents(run):
        await feed.put(prompts(2))
        await eventually(lambda: len(calls) == 4, 0.01)
        (harness,) = live(turns).runner._harnesses.values()
        first = harness.events
        first._getters[0].get_loop().call_soon_threadsafe(harness.leave)
        await eventually(lambda: harness.events not in (None, first), 0.01)
        goes_on.set()
        assert ids(await feed.batch()) == ["q0", "q1"]
    assert set(calls.values()) == {1}


async def test_a_group_whose_call_fails_begins_again(url, turns, monkeypatch) -> None:
    """One finish fails for good. Its group's sessions are void at once, and others take their places."""
    finish, failed = AgentSession.finish, []

    async def failing(session: AgentSession, reward: float | None = None) -> Any:
        if not failed:
            failed.append(session.id)
            raise RolloutError(500, "no answer", "InternalServerError")
        return await finish(session, reward)

    monkeypatch.setattr(AgentSession, "finish", failing)
    async with feed_at(url, sessions={"idle_timeout_s": 600}) as feed, feed.agents(two_turns):
        await feed.put(prompts(2))
        batch = await feed.batch()
        assert (ids(batch), batch.failed) == (["q0", "q1"], [])
        assert failed[0] not in [each.id for group in batch.groups for each in group.trajectories]


async def test_agents_of_a_group_that_became_too_old_are_cancelled(url, turns) -> None:
    update(turns, "step-0")
    begun, ended = [], []

    async def run(session: AgentSession) -> float:
        if session.prompt["data"] == 0:
            begun.append(session.id)
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(session.id)
        return await two_turns(session)

    async with feed_at(url, batch=1, max_staleness=0, on_stale="drop") as feed, feed.agents(run):
        await feed.put(prompts(2))
        await eventually(lambda: len(begun) == 2, 0.01)
        update(turns, "step-1")
        batch = await feed.batch()
        assert (ids(batch), batch.dropped, batch.groups[0].born_version) == (["q1"], ["q0"], "step-1")
        await eventually(lambda: len(ended) == 2, 0.01)


async def test_kv_of_running_agents_is_computed_again_if_the_feed_says_so(url, turns) -> None:
    engine = turns.app.state.rollout_service.engine
    update(turns, "step-0")
    goes_on = asyncio.Event()

    async def run(session: AgentSession) -> float:
        await goes_on.wait()
        return await two_turns(session)

    async with feed_at(url, batch=2, on_update="recompute") as feed, feed.agents(run):
        await feed.put(prompts(2))
        await eventually(lambda: len([each for each in live(turns).running if each.group_id is not None]) == 2, 0.01)
        groups = [group.group_id for group in live(turns).running]
        update(turns, "step-1")
        batch = asyncio.create_task(feed.batch())
        await eventually(lambda: bool(engine.recomputed), 0.01)
        (names,) = engine.recomputed
        for group in groups:
            assert all(not names_of_group(id).isdisjoint(names) for id in (group, f"{group}-scored"))
        goes_on.set()
        assert ids(await batch) == ["q0", "q1"]


async def test_deferred_prompts_run_again_without_spare_sessions(url, turns) -> None:
    update(turns, "step-0")
    sessions: Counter[str] = Counter()

    async def run(session: AgentSession) -> float:
        sessions[session.prompt["id"]] += 1
        if session.prompt["data"] == 0 and sessions["q0"] <= 3:
            await asyncio.Event().wait()
        return await two_turns(session)

    async with feed_at(url, batch=1, max_staleness=0, on_stale="defer", redundancy=1) as feed, feed.agents(run):
        await feed.put(prompts(1))
        await eventually(lambda: sessions["q0"] == 3, 0.01)
        update(turns, "step-1")
        batch = await feed.batch()
        assert (ids(batch), batch.deferred, batch.groups[0].sessions) == (["q0"], ["q0"], [])
    assert sessions["q0"] == 5


async def test_groups_whose_rewards_are_alike_make_room_for_others_and_void_ones_are_named(url, turns) -> None:
    async def run(session: AgentSession) -> float:
        if session.prompt["data"] == 0:
            raise Void("no sandbox")
        await session.chat([USER])
        return float(session.number) if session.prompt["data"] == 2 else 1.0

    async with feed_at(url, batch=1, max_staleness=0, filter="zero_variance") as feed, feed.agents(run):
        await feed.put(prompts(3))
        batch = await feed.batch()
        assert (ids(batch), batch.filtered, [each.prompt_id for each in batch.failed]) == (["q2"], ["q1"], ["q0"])


async def test_no_prompt_is_lost_by_weights_that_are_not_finite(url, turns) -> None:
    update(turns, "bad")
    calls: Counter[str] = Counter()

    async def run(session: AgentSession) -> float:
        calls[session.prompt["id"]] += 1
        is_bad = turns.app.state.rollout_service.engine.weight_version == "bad"
        await session.chat([{"role": "user", "content": "bad weights"} if is_bad else USER])
        return 1.0

    async with feed_at(url, batch=2) as feed, feed.agents(run):
        await feed.put(prompts(2))
        await eventually(lambda: live(turns).waits_for == "weights" and not live(turns).rule.running, 0.01)
        before = calls.total()
        update(turns, "good")
        batch = await feed.batch()
        assert (ids(batch), batch.failed, calls.total() - before) == (["q0", "q1"], [], 4)
        assert "NaN or infinite" in batch.warnings[0]


async def test_an_agent_that_brings_no_reward_delays_its_group_no_longer_than_a_session_may_be_idle(url, turns) -> None:
    async def run(session: AgentSession) -> float:
        await session.chat([USER], max_tokens=5)
        await asyncio.Event().wait()
        return 1.0

    sessions = {"max_turns": 1, "idle_timeout_s": 1}
    async with feed_at(url, batch=1, sessions=sessions) as feed, feed.agents(run):
        await feed.put(prompts(1))
        (group,) = (await feed.batch()).groups
        assert [(each.state, each.reward) for each in group.trajectories] == [("truncated", None)] * 2


async def test_a_program_that_ends_in_an_agent_ends_the_block(url, turns) -> None:
    class End(BaseException):
        """Is meant for the whole program."""

    async def run(session: AgentSession) -> float:
        raise End

    async with feed_at(url) as feed:
        await feed.put(prompts(1))
        with pytest.raises(End):
            async with feed.agents(run):
                await asyncio.Event().wait()


async def test_agents_end_with_their_feed(url, turns) -> None:
    async with feed_at(url) as feed:
        agents = asyncio.create_task(feed.run_agents(two_turns))
        await eventually(lambda: live(turns).runner.is_ready, 0.01)
        await feed.delete()
        await agents
        with pytest.raises(RolloutError) as unknown:
            await feed.run_agents(two_turns)
        assert unknown.value.status == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling_params": {"seed": 3}}, "sampling_params"),
        ({"reward": {"name": "math"}}, "reward"),
        ({"redundancy": "auto"}, "redundancy"),
        ({"on_update": "stop"}, "on_update"),
        ({"sessions": {"turns": 2}}, "sessions.turns"),
        ({"sessions": {"max_sessions": 1}}, "max_sessions"),
        ({"batch": 1024, "max_staleness": 3, "group_size": 32}, "batch"),
    ],
)
async def test_bad_fields_are_refused_when_the_feed_is_made(turns, fields, param) -> None:
    body = {"id": "a", "group_size": 2, "batch": 2, "sessions": {}, **fields}
    async with http_of(turns.app) as http:
        response = await http.post("/v1/feeds", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


async def test_a_feed_without_sessions_has_no_harness(turns, monkeypatch) -> None:
    async with http_of(turns.app) as http:
        await make(http)
        assert (await http.get("/v1/feeds/a/events")).status_code == 409
        assert (await http.get("/v1/feeds/b/events")).status_code == 404
        await http.delete("/v1/feeds/a")
        monkeypatch.setattr(harnesses, "MAX_HARNESSES", 0)
        terms = {"id": "a", "group_size": 2, "batch": 2, "sessions": {}}
        assert (await http.post("/v1/feeds", json=terms)).status_code == 201
        assert (await http.get("/v1/feeds/a/events")).status_code == 429


async def test_complete_groups_survive_a_kill_and_others_run_again(url, turns, tmp_path: Path) -> None:
    path, state = tmp_path / "feeds.sqlite", turns.app.state
    made = state.feed_service._metrics, state.rollout_service
    update(turns, "step-0")

    def start() -> None:
        wait_for_disk()
        services = made[1], FakeEngine(weight_version="step-0"), Metrics(CollectorRegistry()), FeedStore(path)
        state.feed_service = FeedService(*services, sessions=lambda: turns.service)

    async def run(session: AgentSession) -> float:
        if session.prompt["data"] == 1 and is_first:
            await asyncio.Event().wait()
        return await two_turns(session)

    is_first = True
    start()
    async with feed_at(url, max_staleness=0) as feed:
        async with feed.agents(run):
            await feed.put(prompts(2))
            await eventually(lambda: live(turns).rule.complete, 0.01)
        start()
        is_first = False
        async with feed.agents(run):
            before, after = await feed.batch(drain=True), await feed.refresh()
        assert (ids(before), after.totals.num_failed) == (["q0", "q1"], 0)


async def test_a_group_that_a_feed_watches_is_not_its_clients_to_delete(turns) -> None:
    async with http_of(turns.app) as http:
        terms = {"id": "a", "group_size": 2, "batch": 2, "sessions": {}}
        await http.post("/v1/feeds", json=terms)
        await put(http, 0, 1)
        feed = live(turns)
        events = feed.runner.events("h")
        assert (await anext(events)).type == "harness"
        declared = await anext(events)
        response = await http.delete(f"/v1/groups/{declared.group_id}")
        assert (response.status_code, "a feed" in response.json()["error"]["message"]) == (409, True)
        assert "no harness" not in (await take(http, 504, timeout_s=0.01))["message"]
        await events.aclose()

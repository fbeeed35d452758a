"""Feeds by our clients, over a real server."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.parts.feeds.test_feeds import TERMS
from vllm_rollout import AsyncRolloutClient, RolloutClient, RolloutError
from vllm_rollout.kernel.client.connection import POLL_INTERVAL_S
from vllm_rollout.parts.feeds.client import feed as feed_module
from vllm_rollout.parts.feeds.client.feed import AsyncFeed
from vllm_rollout.parts.feeds.rules.bias import BiasMeter

FEED = {name: TERMS[name] for name in ("group_size", "batch", "max_staleness")}


def test_a_loop_over_batches_ends_when_every_prompt_has_come_back(client: RolloutClient, engine) -> None:
    seen: list[str] = []
    with client.feed(**FEED, redundancy=2) as feed:
        feed.put(f"question {i}" for i in range(8))
        for step, batch in enumerate(feed):
            assert batch.version == step
            assert all(group.staleness <= 1 for group in batch.groups)
            seen += [group.prompt_id for group in batch.groups]
            engine.weight_version = f"step-{step + 1}"
            if step == 0:
                feed.put([{"id": "late", "prompt": "late"}])
        assert feed.refresh().num_batches == 4
    assert sorted(seen) == sorted(["late", *map(str, range(8))])
    with pytest.raises(RolloutError) as gone:
        feed.refresh()
    assert gone.value.status == 404


async def test_the_async_client_has_the_same_feed(server_url: str) -> None:
    async with AsyncRolloutClient(server_url) as client:
        async with client.feed(**FEED, id="mine") as feed:
            await feed.put([{"id": "a", "prompt": "a"}, "b"])
            assert [len(batch.groups) async for batch in feed] == [2]
            again = await client.feed(**FEED, id="mine")
            assert again.info.num_batches == feed.info.num_batches + 2
        with pytest.raises(RolloutError):
            await again.refresh()


def test_a_loop_without_a_group_raises_the_reason(client: RolloutClient) -> None:
    with client.feed(**FEED) as feed:
        assert list(feed) == []  # nothing was put
        feed.put([{"id": str(i), "prompt_token_ids": [5000]} for i in range(6)])
        with pytest.raises(RolloutError, match=r"gave no group.*6 failed, 0 filtered, 0 dropped.*out of vocabulary"):
            next(iter(feed))


def test_a_loop_whose_groups_were_all_dropped_says_why(client: RolloutClient, engine) -> None:
    engine.step_s, engine.weight_version = 60, "step-0"
    with client.feed(**{**FEED, "on_stale": "drop", "max_staleness": 0}) as feed:
        feed.put(["a", "b", "c"])
        engine.weight_version = "step-1"
        with pytest.raises(RolloutError, match=r"0 filtered, 3 dropped\. Dropped ones became too old: raise"):
            next(iter(feed))


def test_a_loop_warns_at_its_end_of_prompts_that_did_not_come_back(client: RolloutClient) -> None:
    with client.feed(**FEED) as feed:
        feed.put(["a", "b", "c"])
        batches = iter(feed)
        assert len(next(batches).groups) == 3
        feed.put([{"id": "bad", "prompt_token_ids": [5000]}])
        with pytest.warns(UserWarning, match="has ended.*1 failed, 0 filtered, 0 dropped.*out of vocabulary"):
            assert next(batches, None) is None


def test_feeds_are_listed_and_one_whose_trainer_has_gone_is_deleted(client: RolloutClient) -> None:
    kept, _ = client.feed(**FEED, id="kept"), client.feed(**FEED)
    kept.put(["a"])
    (left,) = (feed.id for feed in client.feeds() if feed.id != "kept")
    client.delete_feed(left)
    assert [(feed.id, feed.totals.num_put) for feed in client.feeds()] == [("kept", 1)]
    kept.delete()


CUTS = {"amid an idle wait": (100.0, 5, 5), "for longer than it waits": (250.0, 99, 3), "at once": (0.1, 99, 3)}
"""Seconds after which a connection is cut, the request that is answered, and the number of requests."""


@pytest.mark.parametrize("when", CUTS)
async def test_the_wait_for_a_lost_server_begins_at_its_loss(monkeypatch, when: str) -> None:
    seconds, answered, num_requests = CUTS[when]
    clock, sent = [0.0], list[float]()
    monkeypatch.setattr(feed_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(feed_module, "POLL_INTERVAL_S", 50.0)

    async def send(call: Any) -> Any:
        sent.append(call.body["timeout_s"])
        clock[0] += seconds
        if len(sent) < answered:
            raise RolloutError(None, "cut", "ReadError")
        return SimpleNamespace(groups=[1])

    async def sleep(seconds: float) -> None:
        clock[0] += seconds

    feed = AsyncFeed(SimpleNamespace(send=send, _sleep=sleep), SimpleNamespace(id="a", num_batches=0))
    with nullcontext() if answered == num_requests else pytest.raises(RolloutError, match="cut"):
        await feed.batch(key="k")
    assert len(sent) == num_requests
    assert sent == sorted(sent, reverse=True), "a server has less time left, and then says what a batch waits for"


def test_a_batch_is_asked_for_again_by_its_key(client: RolloutClient) -> None:
    feed = client.feed(**FEED)
    feed.put(["a", "b", "c"])
    assert feed.batch(key="k") == feed.batch(key="k")
    with pytest.raises(RolloutError, match="no prompt waits") as late:
        feed.batch(timeout_s=0.05)
    assert late.value.status == 504
    feed.delete()


async def test_a_key_is_used_again_until_its_batch_has_come(server_url: str) -> None:
    async with AsyncRolloutClient(server_url) as client, client.feed(**FEED) as feed:
        keys, errors, send = [], [], client.send

        async def sent(call):
            keys.append(call.body["idempotency_key"])
            if errors:
                raise errors.pop()
            return await send(call)

        client.send = sent
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(feed.batch(), 0.05)
        with pytest.raises(RolloutError, match="504"):
            await feed.batch(timeout_s=0.05)
        assert [batch async for batch in feed] == []
        assert (len(keys), len({*keys})) == (3, 1)
        for status in (404, 409, 410):  # no batch comes by this key
            errors.append(RolloutError(status, "", ""))
            with pytest.raises(RolloutError, match=str(status)):
                await feed.batch()
        assert len({*keys}) == 4
        client.send = send


class Errors:
    """Stands in for a client's sending: raises these errors, then sends. Time passes in its sleeps only."""

    def __init__(self, client: AsyncRolloutClient, monkeypatch: pytest.MonkeyPatch, *errors: RolloutError) -> None:
        self.left, self.keys, self.slept_s = [*errors], list[str](), 0.0
        self._send = client.send
        monkeypatch.setattr(client, "send", self.send)
        monkeypatch.setattr(client, "_sleep", self.sleep)
        clock = SimpleNamespace(monotonic=lambda: self.slept_s)
        monkeypatch.setattr("vllm_rollout.parts.feeds.client.feed.time", clock)

    async def sleep(self, seconds: float) -> None:
        self.slept_s += seconds

    async def send(self, call: Any) -> Any:
        if not call.path.endswith("/batches"):
            return await self._send(call)
        self.keys.append(call.body["idempotency_key"])
        if self.left:
            raise self.left.pop(0)
        return await self._send(call)


LOST = RolloutError(None, "no connection", "ConnectError")
NOT_YET = RolloutError(503, "it does not answer yet. Try again.", "ServiceUnavailable", retry_after_s=3.0)
STOPPED = RolloutError(503, "the engine has stopped", "ServiceUnavailable")
NO_UPSTREAM = RolloutError(502, "it ended amid the request", "BadGateway")


async def test_a_loop_over_batches_survives_a_short_loss_of_the_server(server_url: str, monkeypatch) -> None:
    async with AsyncRolloutClient(server_url) as client, client.feed(**FEED) as feed:
        await feed.put(["a", "b"])
        sent = Errors(client, monkeypatch, STOPPED, LOST, NO_UPSTREAM, NOT_YET)
        assert [len(batch.groups) async for batch in feed] == [2]
        assert len({*sent.keys[:5]}) == 1
        assert sent.slept_s == 3 * POLL_INTERVAL_S + 3.0


async def test_a_server_that_stays_lost_is_said_and_its_batch_comes_later(server_url: str, monkeypatch) -> None:
    async with AsyncRolloutClient(server_url) as client, client.feed(**FEED) as feed:
        await feed.put(["a", "b"])
        sent = Errors(client, monkeypatch, *[LOST] * 99)
        with pytest.raises(RolloutError, match="no connection"):
            await feed.batch(drain=True, reconnect_s=2)
        assert sent.slept_s == 2
        asked = len(sent.keys)
        with pytest.raises(RolloutError, match="no connection"):
            await feed.batch(drain=True, reconnect_s=0)
        assert len(sent.keys) == asked + 1
        sent.left.clear()
        assert len((await feed.batch(drain=True)).groups) == 2
        assert len({*sent.keys}) == 1


@pytest.mark.parametrize(
    "error",
    [
        RolloutError(None, "not of this client's version", "UnexpectedAnswer"),
        RolloutError(None, "silent", "ReadTimeout"),
    ],
)
async def test_an_error_that_does_not_pass_is_said_at_once(error, server_url: str, monkeypatch) -> None:
    async with AsyncRolloutClient(server_url) as client, client.feed(**FEED) as feed:
        sent = Errors(client, monkeypatch, error)
        with pytest.raises(RolloutError, match=error.message):
            await feed.batch()
        assert len(sent.keys) == 1


@pytest.mark.parametrize("is_known", [True, False])
def test_a_loop_after_a_restart_does_not_say_that_no_group_came(client: RolloutClient, app, is_known) -> None:
    """The meter begins anew with the server. A trainer that was started anew knows less than its feed."""
    feed = client.feed(**FEED, id="mine")
    feed.put(["a", "b", "c"])
    assert len(feed.batch().groups) == 3
    app.state.feed_service.live[0].meter = BiasMeter()
    feed.put([{"id": "bad", "prompt_token_ids": [5000]}])
    after = feed if is_known else client.feed(**FEED, id="mine")
    with pytest.warns(UserWarning, match="has ended.*1 failed"):
        assert list(after) == []
    feed.delete()


def test_prompts_that_are_put_again_under_their_key_are_put_once(client: RolloutClient, monkeypatch) -> None:
    monkeypatch.setattr("vllm_rollout.parts.feeds.client.feed.MAX_PROMPTS", 2)
    with client.feed(**FEED, id="mine") as feed:
        assert feed.put(["a", "b", "c"], key="step-1").totals.num_put == 3
        again = client.feed(**FEED, id="mine")  # of a trainer that was started anew
        assert again.put(["a", "b", "c"], key="step-1").totals.num_put == 3
        with pytest.raises(RolloutError, match="has put other prompts") as other:
            again.put(["a", "b", "d"], key="step-1")
        assert other.value.status == 409
        assert again.put(["a", "b", "d"]).totals.num_put == 6


def test_a_single_prompt_is_refused(client: RolloutClient) -> None:
    with client.feed(**FEED) as feed, pytest.raises(TypeError, match="iterable of prompts"):
        feed.put("question")

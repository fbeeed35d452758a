"""Feeds over HTTP: what a trainer sees."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from contextlib import nullcontext
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.kernel.http.conftest import http_of, make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.support.waiting import eventually
from vllm_rollout.kernel.http.engine import GroupOrder, RequestError
from vllm_rollout.kernel.http.protocol import Prompt
from vllm_rollout.kernel.rules.request_names import names_of_request
from vllm_rollout.kernel.rules.types import NOT_FINITE
from vllm_rollout.parts.feeds.http import live
from vllm_rollout.parts.feeds.http.answers import FeedBatch
from vllm_rollout.parts.feeds.http.live import MAX_STARTS
from vllm_rollout.parts.feeds.http.queue import OBJECT_BYTES, PromptQueue

TERMS = {"group_size": 2, "batch": 3, "max_staleness": 1, "sampling_params": {"seed": 3}}


def prompts(first: int, count: int) -> list[dict[str, Any]]:
    return [{"id": f"q{i}", "prompt": f"question {i}"} for i in range(first, first + count)]


async def make(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await http.post("/v1/feeds", json={"id": "a", **TERMS, **fields})
    assert response.status_code == 201, response.text
    return response.json()


async def put(http: httpx.AsyncClient, first: int, count: int, status: int = 200, **fields: Any) -> dict[str, Any]:
    response = await http.post("/v1/feeds/a/prompts", json={"prompts": prompts(first, count), **fields})
    assert response.status_code == status, response.text
    return response.json()


async def take(http: httpx.AsyncClient, status: int = 200, **fields: Any) -> dict[str, Any]:
    response = await http.post("/v1/feeds/a/batches", json={"timeout_s": 60, **fields})
    assert response.status_code == status, response.text
    if status != 200:
        return response.json()["error"]
    FeedBatch.model_validate_json(response.content)
    return response.json()


async def look(http: httpx.AsyncClient) -> dict[str, Any]:
    return (await http.get("/v1/feeds/a")).json()


async def update(app: FastAPI, engine: FakeEngine, name: str) -> None:
    """New weights under this name, as `/update_weight_version` gives them."""
    engine.weight_version = name
    await app.state.feed_service.hear()


def ids(batch: dict[str, Any]) -> list[str]:
    return [group["prompt_id"] for group in batch["groups"]]


async def test_batches_of_complete_groups_come_while_weights_come(app, http, engine) -> None:
    engine.weight_version = "step-0"
    await make(http)
    feed = await put(http, 0, 12)
    assert (feed["num_running"], feed["num_waiting"], feed["capacity"]) == (6, 6, 0)
    seen = []
    for step in range(4):
        batch = await take(http)
        assert (batch["batch"], batch["version"], batch["weight_version"]) == (step, step, f"step-{step}")
        assert len(batch["groups"]) == 3
        for group in batch["groups"]:
            assert (group["status"], len(group["trajectories"])) == ("complete", 2)
            assert group["staleness"] == step - group["born"] <= 1
            assert group["born_version"] == f"step-{group['born']}"
            assert group["trajectories"][0]["weight_versions"]
        seen += ids(batch)
        await update(app, engine, f"step-{step + 1}")
    assert sorted(seen) == sorted(f"q{i}" for i in range(12))
    feed = await look(http)
    assert (feed["num_batches"], feed["version"], feed["waits_for"]) == (4, 4, "prompts")
    assert feed["totals"]["num_taken"] == 12
    assert feed["totals"]["generated_tokens"] > 0


async def test_stopped_answers_of_a_race_come_with_all_that_an_off_policy_trainer_needs(http, engine) -> None:
    engine.weight_version = "step-0"
    await make(http, redundancy=2, include=["logprobs", "stopped"])
    await put(http, 0, 6)
    for group in (await take(http))["groups"]:
        assert (len(group["trajectories"]), len(group["candidates"])) == (2, 2)
        for stopped in group["candidates"]:
            assert stopped["state"] == "surplus"
            num_tokens = stopped["num_tokens"]
            assert (len(stopped["token_ids"]), len(stopped["logprobs"])) == (num_tokens, num_tokens)
            assert stopped["weight_versions"] == [{"version": "step-0", "start": 0, "end": num_tokens}]


async def test_a_batch_is_taken_once_and_sent_again_by_its_key(http) -> None:
    await make(http, max_staleness=2)
    await put(http, 0, 9)
    first = await take(http, idempotency_key="k0")
    assert await take(http, idempotency_key="k0") == first
    second = await take(http, idempotency_key="k1")
    assert set(ids(first)).isdisjoint(ids(second))
    await take(http, idempotency_key="k2")
    error = await take(http, 410, idempotency_key="k0")
    assert error["param"] == "idempotency_key"


async def test_a_request_that_is_repeated_while_it_waits_gets_the_same_batch(app, http) -> None:
    await make(http)
    waiting = [asyncio.create_task(take(http, idempotency_key="k0")) for _ in range(2)]
    turn = app.state.feed_service._feeds["a"].turn
    await eventually(lambda: turn._waiters)
    await put(http, 0, 6)
    first, second = await asyncio.gather(*waiting)
    assert first == second


async def test_two_trainers_on_one_feed_get_different_groups(http) -> None:
    await make(http)
    waiting = [asyncio.create_task(take(http)) for _ in range(2)]
    await asyncio.sleep(0.01)
    await put(http, 0, 6)
    batches = await asyncio.gather(*waiting)
    assert sorted(ids(batches[0]) + ids(batches[1])) == [f"q{i}" for i in range(6)]


async def test_a_trainer_waits_no_longer_than_it_says_also_behind_another(http) -> None:
    await make(http)
    first = asyncio.create_task(take(http))
    await asyncio.sleep(0.01)
    assert "no prompt waits" in (await take(http, 504, timeout_s=0.05))["message"]
    await put(http, 0, 3)
    assert len((await first)["groups"]) == 3


async def test_a_client_that_leaves_takes_nothing(app, http) -> None:
    await make(http)
    waiting = asyncio.create_task(take(http))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await put(http, 0, 3)
    assert len((await take(http))["groups"]) == 3


async def test_prompts_that_end_give_a_smaller_batch_and_then_none(http) -> None:
    await make(http)
    await put(http, 0, 5)
    batches = [await take(http, drain=True) for _ in range(3)]
    assert [len(batch["groups"]) for batch in batches] == [3, 2, 0]


async def test_a_batch_that_does_not_come_says_what_it_waits_for(app, http, engine) -> None:
    engine.weight_version = "step-0"
    await make(http, max_staleness=0)
    assert "no prompt waits" in (await take(http, 504, timeout_s=0.05))["message"]
    await put(http, 0, 6)
    await take(http)
    await update(app, engine, "step-0")  # named twice: no update
    error = await take(http, 504, timeout_s=0.05)
    assert "weights with a new name" in error["message"]
    assert "'step-0'" in error["message"]
    assert (await look(http))["waits_for"] == "weights"
    engine.weight_version = "step-1"  # another API process got them
    assert (await take(http))["version"] == 1


async def test_an_update_while_a_trainer_waits_is_in_the_version_of_its_batch(app, http, engine) -> None:
    engine.step_s, engine.lengths = 0.005, {0: 30, 1: 30}
    await make(http)
    await put(http, 0, 6)
    waiting = asyncio.create_task(take(http))
    await eventually(lambda: engine.num_running == 12)
    await update(app, engine, "1")
    batch = await waiting
    assert (batch["version"], [group["staleness"] for group in batch["groups"]]) == (1, [1, 1, 1])


async def test_kv_of_running_groups_is_computed_again_if_the_feed_says_so(app, http, engine) -> None:
    engine.step_s, engine.lengths = 0.005, {0: 60, 1: 60}
    await make(http, on_update="recompute", batch=1)
    await update(app, engine, "1")  # nothing runs
    await put(http, 0, 2)
    await eventually(lambda: engine.num_running == 4)
    await update(app, engine, "2")
    await eventually(lambda: bool(engine.recomputed))
    batches = [await take(http), await take(http)]
    ids = [group["rollout_id"] for batch in batches for group in batch["groups"]]
    assert engine.recomputed == [sorted(set().union(*map(names_of_request, ids)))]


async def test_weights_that_go_back_are_an_update_and_a_warning(app, http, engine) -> None:
    engine.weight_version = "step-9"
    await make(http)
    await put(http, 0, 6)
    await update(app, engine, "step-8")
    batch = await take(http)
    assert batch["version"] == 1
    assert "went back from 'step-9' to 'step-8'" in batch["warnings"][0]


async def test_groups_that_are_too_old_are_stopped_and_named(app, http, engine) -> None:
    engine.step_s, engine.max_length = 0.02, 400
    engine.lengths = {0: 400, 1: 400}
    await make(http, on_stale="drop")
    await put(http, 0, 3)
    await eventually(lambda: engine.num_running == 6)
    await update(app, engine, "1")
    engine.lengths = {0: 1, 1: 1}
    await put(http, 3, 3)
    await update(app, engine, "2")
    await eventually(lambda: engine.num_aborted == 6)
    batch = await take(http)
    assert (batch["dropped"], sorted(ids(batch))) == (["q0", "q1", "q2"], ["q3", "q4", "q5"])
    assert batch["meter"]["dropped"]["num_groups"] == 3
    assert batch["meter"]["dropped"]["mean_tokens"] >= 1
    assert batch["meter"]["admitted"]["num_groups"] == 6


async def test_a_group_over_the_bound_is_returned_and_counted(app, http, engine) -> None:
    engine.step_s, engine.lengths = 0.005, {0: 20, 1: 20}
    await make(http, on_stale="finish", max_staleness=0, batch=1)
    await put(http, 0, 1)
    await eventually(lambda: engine.num_running == 2)
    await update(app, engine, "1")
    batch = await take(http)
    assert (batch["num_over"], batch["max_staleness"], batch["groups"][0]["staleness"]) == (1, 1, 1)


async def test_a_group_that_fails_gives_its_place_back_and_is_named(http, engine) -> None:
    await make(http, batch=2)
    body = {"prompts": [{"id": "bad", "prompt_token_ids": [5000]}, *prompts(0, 2)]}
    assert (await http.post("/v1/feeds/a/prompts", json=body)).status_code == 200
    batch = await take(http)
    assert [each["prompt_id"] for each in batch["failed"]] == ["bad"]
    assert "out of vocabulary" in batch["failed"][0]["reason"]
    assert sorted(ids(batch)) == ["q0", "q1"]


async def test_no_prompt_is_lost_while_the_server_refuses_the_fields_of_its_feed(app, http, engine) -> None:
    engine.weight_version, engine.adapters = "step-0", ("b",)
    await make(http, model="b", batch=2, max_staleness=0)
    await put(http, 0, 6)
    batches = [await take(http)]
    waiting = asyncio.create_task(take(http, 409))
    await asyncio.sleep(0.01)
    engine.adapters = ()  # unloaded
    await update(app, engine, "step-1")
    message = (await waiting)["message"]
    assert "the server refuses its fields: model: 'b' is not served" in message
    assert "repeat this request" in message
    assert (await take(http, 409))["message"] == message
    feed = await put(http, 6, 2)
    assert (feed["waits_for"], feed["totals"]["num_failed"]) == ("fields", 0)
    assert "model: 'b' is not served" in feed["refusal"]
    assert (await look(http))["waits_for"] == "fields"
    engine.adapters = ("b",)
    for step in (2, 3, 4):
        batches.append(await take(http))
        await update(app, engine, f"step-{step}")
    assert [each for batch in batches for each in ids(batch)] == [f"q{i}" for i in range(8)]
    assert all(batch["failed"] == [] for batch in batches)
    assert (await look(http))["refusal"] is None


async def test_complete_groups_come_although_the_server_refuses_the_fields_of_their_feed(app, http, engine) -> None:
    engine.weight_version, engine.adapters = "step-0", ("b",)
    await make(http, model="b", batch=1, max_staleness=1)
    await put(http, 0, 3)
    await eventually(lambda: len(app.state.feed_service.live[0].rule.complete) == 2)
    engine.adapters = ()
    assert ids(await take(http)) == ["q0"]
    await update(app, engine, "step-1")
    await eventually(lambda: app.state.feed_service.live[0].refusal)
    assert (await look(http))["waits_for"] == "trainer"
    assert ids(await take(http)) == ["q1"]
    assert "refuses" in (await take(http, 409, drain=True))["message"]


async def test_prompts_are_put_once_by_their_key_and_an_id_that_is_there_is_refused(http) -> None:
    await make(http)
    await put(http, 0, 10, idempotency_key="p")
    feed = await put(http, 0, 10, idempotency_key="p")
    assert feed["num_waiting"] + feed["num_running"] + feed["num_complete"] == 10
    assert (await put(http, 9, 2, 409))["error"]["param"] == "prompts.0.id"
    body = {"prompts": [{"id": "11", "prompt": "a"}, {"prompt": "b"}]}
    error = (await http.post("/v1/feeds/a/prompts", json=body)).json()["error"]
    assert "prompts.1.id: '11' is the number of this prompt's turn, its default, and is in" in error["message"]


async def test_prompts_without_ids_get_numbers(http) -> None:
    await make(http, batch=2)
    body = {"prompts": [{"prompt": "a"}, {"prompt": "b"}]}
    assert (await http.post("/v1/feeds/a/prompts", json=body)).status_code == 200
    assert sorted(ids(await take(http))) == ["0", "1"]


async def test_a_feed_is_made_once_and_deleted_with_its_groups(http, engine) -> None:
    engine.step_s = 0.02
    await make(http)
    assert (await http.post("/v1/feeds", json={"id": "a", **TERMS})).status_code == 200
    response = await http.post("/v1/feeds", json={"id": "a", **TERMS, "batch": 4})
    assert (response.status_code, response.json()["error"]["param"]) == (409, "batch")
    await put(http, 0, 6)
    await eventually(lambda: engine.num_running > 0)
    waiting = asyncio.create_task(take(http, 404))
    await asyncio.sleep(0.01)
    assert (await http.delete("/v1/feeds/a")).status_code == 204
    assert engine.num_running == 0
    await waiting
    assert (await http.get("/v1/feeds/a")).status_code == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"group_size": 0}, "group_size"),
        ({"batch": 0}, "batch"),
        ({"batch": 10_000}, "batch"),
        ({"filter": "zero_variance"}, "filter"),
        ({"redundancy": 100}, "redundancy"),
        ({"sampling_params": {"n": 2}}, "sampling_params.n"),
        ({"prompts": []}, "prompts"),
    ],
)
async def test_bad_fields_are_refused_when_the_feed_is_made(http, fields, param) -> None:
    response = await http.post("/v1/feeds", json={"id": "a", **TERMS, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


async def test_too_many_feeds_are_refused(http, monkeypatch) -> None:
    monkeypatch.setattr("vllm_rollout.parts.feeds.http.service.MAX_FEEDS", 1)
    await make(http)
    response = await http.post("/v1/feeds", json={"id": "b", **TERMS})
    assert (response.status_code, "DELETE one of them" in response.text) == (409, True)
    await http.delete("/v1/feeds/a")
    await make(http, id="b")


async def test_too_many_waiting_prompts_are_refused(http, monkeypatch) -> None:
    monkeypatch.setattr("vllm_rollout.parts.feeds.http.service.MAX_WAITING_BYTES", 3000)
    await make(http, batch=1, max_staleness=0)
    error = (await put(http, 0, 9, 507))["error"]
    assert (error["param"], "at most 3000 may" in error["message"]) == ("prompts", True)
    assert (await look(http))["num_waiting"] == 0


async def test_prompts_that_are_being_written_count_as_waiting(app, http, monkeypatch) -> None:
    monkeypatch.setattr("vllm_rollout.parts.feeds.http.service.MAX_WAITING_BYTES", 3000)
    written = asyncio.Event()
    monkeypatch.setattr("vllm_rollout.parts.feeds.http.kept.Kept.put", lambda *its: written.wait())
    await make(http, batch=1, max_staleness=0)
    await make(http, id="b", batch=1)
    first = asyncio.create_task(put(http, 0, 2))
    await eventually(lambda: app.state.feed_service._coming_bytes > 1500)
    assert (await http.post("/v1/feeds/b/prompts", json={"prompts": prompts(2, 2)})).status_code == 507
    written.set()
    assert (await first)["num_waiting"] == 1
    assert app.state.feed_service._coming_bytes == 0


@pytest.mark.parametrize("seed", range(5))
def test_memory_and_ids_of_waiting_prompts_are_counted_as_they_come_and_go(seed: int) -> None:
    queue, chance, out = PromptQueue(), random.Random(seed), []
    for _ in range(60):
        match chance.randrange(5):
            case 0:
                queue.put(queue.checked([Prompt(prompt="p" * chance.randint(1, 9))] * 3, []))
            case 1 if queue.waiting:
                out.append(queue.next())
            case 2 if out:
                queue.defer(out.pop())
            case 3 if out:
                queue.again(out.pop())
            case 4:
                queue.start_long(chance.randrange(3))
        its = [*queue.waiting, *queue.deferred]
        assert queue.num_bytes == sum(each.num_bytes for each in its) >= OBJECT_BYTES * len(its)
        with pytest.raises(RequestError, match="in this feed") if its else nullcontext():
            queue.checked([each.prompt for each in its], [])
    queue.clear()
    assert (queue.num_bytes, len(queue.checked([Prompt(id="0", prompt="p")], []))) == (0, 1)


async def test_a_group_that_the_engine_cannot_take_starts_again(http, engine, monkeypatch) -> None:
    monkeypatch.setattr("vllm_rollout.parts.feeds.http.live.AGAIN_S", 0.01)
    await make(http, batch=1)
    engine.dies_at_step = 0
    await put(http, 0, 1)
    await asyncio.sleep(0.05)
    engine.dies_at_step = None
    assert ids(await take(http)) == ["q0"]


async def test_a_group_for_whose_retry_no_rank_is_left_starts_again(http, engine, monkeypatch) -> None:
    """First its rank dies, then the other one is drained for a while."""
    monkeypatch.setattr("vllm_rollout.parts.feeds.http.live.AGAIN_S", 0.01)
    engine.losses, engine.lengths = {"q0": 4}, {0: 9, 1: 9}
    tries = []

    def finds_no_rank(order: GroupOrder) -> bool:
        tries.append(order.group_id)
        return len(tries) in (2, 3)

    engine.finds_no_rank = finds_no_rank
    await make(http, batch=1, max_staleness=0)
    await put(http, 0, 1)
    batch = await take(http)
    assert (ids(batch), batch["failed"], len(tries)) == (["q0"], [], 4)


async def test_a_group_fails_with_its_rank_if_its_feed_says_so(http, engine) -> None:
    engine.losses, engine.lengths = {"q0": 4}, {0: 9, 1: 9}
    await make(http, batch=1, on_engine_failure="fail")
    await put(http, 0, 2)
    batch = await take(http)
    assert (ids(batch), [each["prompt_id"] for each in batch["failed"]]) == (["q1"], ["q0"])


async def test_tokens_of_a_group_that_is_dropped_before_it_starts_again_count_once(app, http, engine) -> None:
    engine.weight_version = "0"
    await make(http, batch=1, max_staleness=0, on_stale="drop")
    feed = app.state.feed_service.live[0]
    run, ended = feed.runner.run, []

    async def fails(number, group) -> None:
        await run(number, group)
        ended.append(group.num_tokens)
        raise RequestError("the engine is paused.", status=503, retry_after_s=60)

    feed.runner.run = fails
    await put(http, 0, 1)
    await eventually(lambda: ended)
    await update(app, engine, "1")
    await eventually(lambda: not feed._tasks)
    totals = (await look(http))["totals"]
    assert totals["generated_tokens"] == totals["wasted_tokens"] == ended[0]


async def test_tokens_of_an_attempt_that_is_lost_or_ends_with_a_passing_error_count_once(
    app, http, engine, monkeypatch
) -> None:
    monkeypatch.setattr(live, "AGAIN_S", 0.01)
    engine.losses, engine.lengths = {"q0": 4}, {0: 9, 1: 9}
    await make(http, batch=1)
    (feed,) = app.state.feed_service.live
    run, ended = feed.runner.run, []

    async def fails_once(number, group) -> None:
        await run(number, group)
        ended.append(group.num_tokens)
        if len(ended) == 1:
            raise RequestError("the engine is paused.", status=503)

    feed.runner.run = fails_once
    await put(http, 0, 1)
    assert ids(await take(http)) == ["q0"]
    totals = (await look(http))["totals"]
    assert (ended, totals["generated_tokens"], totals["wasted_tokens"]) == ([18, 18], 36, 18)


async def test_no_prompt_is_lost_by_weights_that_are_not_finite(app, http, engine) -> None:
    engine.weight_version = "good"
    await make(http, batch=2)
    engine.failures = {0: 1, 1: 1}
    engine.error = NOT_FINITE
    await put(http, 0, 9)
    error = await take(http, 504, timeout_s=0.2)
    assert "weights with a new name" in error["message"]
    assert re.search(f"Under 'good', prompt 'q[0-3]' failed: {re.escape(NOT_FINITE)}", error["message"])
    assert (await look(http))["num_waiting"] == 9
    engine.failures = {}
    await update(app, engine, "better")
    batch = await take(http)
    assert (ids(batch), batch["failed"]) == (["q0", "q1"], [])
    assert "NaN or infinite" in batch["warnings"][0]
    await update(app, engine, "best")
    assert [len((await take(http, drain=True))["groups"]) for _ in range(2)] == [2, 2]


async def test_groups_start_again_when_bad_weights_of_another_model_are_over(app, http, engine) -> None:
    """KV of the other model may have made the logits not finite. This model gets no weights without a batch."""
    engine.weight_version = "step-0"
    await make(http, batch=1)
    engine.failures, engine.error = {0: 1, 1: 1}, NOT_FINITE
    await put(http, 0, 1)
    assert "'q0' failed" in (await take(http, 504, timeout_s=0.2))["message"]
    engine.failures = {}
    engine.adapter_versions["other"] = "good"
    await app.state.feed_service.hear()
    batch = await take(http)
    assert (ids(batch), batch["version"], batch["failed"]) == (["q0"], 0, [])


def poison(engine: FakeEngine, prompt_id: str = "q0") -> None:
    """Let the logits of this prompt never be finite."""
    candidate = engine._candidate

    def poisoned(index, prompt, *rest):
        engine.failures = {0: 1, 1: 1} if prompt.id == prompt_id else {}
        return candidate(index, prompt, *rest)

    engine._candidate, engine.error, engine.lengths = poisoned, NOT_FINITE, {0: 9, 1: 9}  # type: ignore[method-assign]


async def test_a_prompt_that_is_not_finite_under_weights_that_are_good_fails(app, http, engine) -> None:
    engine.weight_version = "step-0"
    poison(engine)
    await make(http, max_staleness=0)
    await put(http, 0, 7)
    batch = await take(http)
    assert ids(batch) == ["q1", "q2", "q3"]
    assert batch["failed"] == [{"prompt_id": "q0", "reason": NOT_FINITE}]
    await update(app, engine, "step-1")
    assert ids(await take(http)) == ["q4", "q5", "q6"]


async def test_a_prompt_that_is_not_finite_under_three_versions_in_a_row_fails(app, http, engine) -> None:
    engine.weight_version = "step-0"
    poison(engine)
    await make(http, max_staleness=0, batch=1)
    await put(http, 0, 2)
    for step in (1, 2):
        assert "'q0' failed" in (await take(http, 504, timeout_s=0.2))["message"]
        await update(app, engine, f"step-{step}")
    batch = await take(http)
    assert (ids(batch), batch["failed"]) == (["q1"], [{"prompt_id": "q0", "reason": NOT_FINITE}])


async def test_weights_of_another_process_fail_no_prompt(http, engine) -> None:
    """The feed has not heard of weights that are not finite, and groups completed under those before."""
    engine.weight_version = "step-0"
    await make(http, batch=1)
    await put(http, 0, 1)
    await take(http)
    engine.step_s, engine.lengths, engine.failures, engine.error = 0.005, {0: 9, 1: 9}, {0: 5, 1: 5}, NOT_FINITE
    await put(http, 1, 1)
    await eventually(lambda: engine.num_running == 2)
    engine.weight_version = "bad-1"
    await eventually(lambda: engine.num_ended == 6)
    assert "Under 'bad-1', prompt 'q1' failed" in (await take(http, 504, timeout_s=0.2))["message"]
    engine.weight_version, engine.failures = "step-2", {}
    assert ids(await take(http)) == ["q1"]


@pytest.mark.parametrize("max_bad_versions", [1, 3])
async def test_a_group_is_dropped_once_by_the_update_that_its_bad_logits_find(
    app, http, engine, monkeypatch, max_bad_versions
) -> None:
    monkeypatch.setattr("vllm_rollout.parts.feeds.rules.finite.MAX_BAD_VERSIONS", max_bad_versions)
    engine.weight_version, engine.step_s = "step-0", 0.005
    engine.lengths, engine.failures, engine.error = {0: 9, 1: 9}, {0: 5, 1: 5}, NOT_FINITE
    await make(http, batch=1, max_staleness=0, on_stale="drop")
    await put(http, 0, 1)
    await eventually(lambda: engine.num_running == 2)
    engine.weight_version = "bad-1"  # another API process got them
    (feed,) = app.state.feed_service.live
    await eventually(lambda: feed.rule.version == 1 and not feed._tasks)
    totals = (await look(http))["totals"]
    assert (totals["generated_tokens"], totals["wasted_tokens"], totals["num_failed"]) == (10, 10, 0)
    batch = await take(http, drain=True)
    assert (batch["dropped"], batch["failed"], batch["warnings"]) == (["q0"], [], [])


async def test_a_feed_that_fills_lets_other_requests_have_turns(app, http, engine) -> None:
    prepare, begun, turn = app.state.rollout_service.prepare, Counter[int](), 0

    async def noted(request):
        begun[turn] += 1
        return await prepare(request)

    async def turns() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    app.state.rollout_service.prepare = noted
    await make(http, batch=200, max_staleness=0)
    other = asyncio.create_task(turns())
    await put(http, 0, 200)
    assert len((await take(http))["groups"]) == 200
    other.cancel()
    assert max(begun.values()) <= 2 * MAX_STARTS


async def test_a_feed_takes_turns_with_other_rollouts_after_any_number_of_updates() -> None:
    """Feeds that were ordered by their updates waited for ever behind rollouts that never end."""
    engine = FakeEngine(weight_version="step-0", num_launch_places=8, step_s=0.002)
    body = {"prompts": prompts(100, 4), "group_size": 4, "sampling_params": TERMS["sampling_params"]}
    app = make_app(engine)
    async with http_of(app) as http:

        async def never_ends() -> None:
            while True:
                (await http.post("/v1/rollouts", json=body)).raise_for_status()

        others = [asyncio.create_task(never_ends()) for _ in range(4)]
        await make(http, max_staleness=0)
        for step in range(3):
            await eventually(lambda: engine.num_running == 8)
            await put(http, 3 * step, 3)
            assert len((await take(http))["groups"]) == 3
            await update(app, engine, f"step-{step + 1}")
        assert not any(other.done() for other in others)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def test_other_rollouts_take_turns_with_a_feed_of_many_groups() -> None:
    engine = FakeEngine(num_launch_places=8, step_s=0.002)
    app = make_app(engine)
    async with http_of(app) as http:
        await make(http, batch=100)
        await put(http, 0, 100)
        await eventually(lambda: engine.num_running == 8)
        body = {"prompts": prompts(300, 4), "group_size": 2, "sampling_params": TERMS["sampling_params"]}
        (await http.post("/v1/rollouts", json=body)).raise_for_status()
        assert (await look(http))["num_complete"] < 30
        assert len((await take(http))["groups"]) == 100


async def test_new_weights_of_one_adapter_are_no_update_for_feeds_of_another(app, http, engine) -> None:
    engine.adapters, engine.weight_version = ("x", "y"), "base"
    for id in ("x", "y"):
        await make(http, id=id, model=id, batch=1, max_staleness=0)
    engine.adapter_versions = {"x": "x-1"}
    await update(app, engine, "base")
    feeds = [(await http.get(f"/v1/feeds/{id}")).json() for id in ("x", "y")]
    assert [(feed["version"], feed["weight_version"]) for feed in feeds] == [(1, "x-1"), (0, "base")]
    engine.adapter_versions = {}
    await update(app, engine, "base-2")  # both adapters' weights
    feeds = [(await http.get(f"/v1/feeds/{id}")).json() for id in ("x", "y")]
    assert [feed["version"] for feed in feeds] == [2, 1]


async def test_a_trainer_that_never_takes_leaves_no_more_groups_than_there_are_places(app, http, engine) -> None:
    await make(http, on_stale="finish")
    await put(http, 0, 40)
    for step in range(5):
        await update(app, engine, str(step))
        await asyncio.sleep(0.05)
    feed = await look(http)
    assert feed["num_running"] + feed["num_complete"] == 6
    assert feed["num_waiting"] == 34


async def test_a_feed_with_too_many_bytes_starts_no_group_before_a_batch_is_taken(
    app, http, engine, monkeypatch
) -> None:
    monkeypatch.setattr("vllm_rollout.parts.feeds.http.service.MAX_BYTES", 2000)
    await make(http)
    assert (await make(http, id="b"))["max_complete_bytes"] == 1000
    await http.delete("/v1/feeds/b")
    await put(http, 0, 12)
    feed = app.state.feed_service.live[0].rule
    await eventually(lambda: len(feed.complete) == 6)
    batches = [await take(http)]
    await update(app, engine, "1")  # without the bound three more groups would start
    seen = await look(http)
    assert (seen["num_complete"], seen["num_running"], seen["num_waiting"], seen["capacity"]) == (3, 0, 6, 0)
    assert seen["complete_bytes"] >= seen["max_complete_bytes"] == 2000
    assert seen["waits_for"] == "trainer"
    for step in range(3):
        batches.append(await take(http))
        await update(app, engine, f"{step + 2}")
    assert [each for batch in batches for each in ids(batch)] == [f"q{i}" for i in range(12)]
    assert "no more groups start before batches are taken" in batches[0]["warnings"][0]


async def test_groups_without_a_place_in_the_engine_wait_again_when_a_feed_is_full(engine, monkeypatch) -> None:
    monkeypatch.setattr("vllm_rollout.parts.feeds.http.service.MAX_BYTES", 1)
    engine.num_launch_places = 4
    app = make_app(engine)
    async with http_of(app) as http:
        await make(http, max_staleness=9)
        await put(http, 0, 30)
        feed = app.state.feed_service.live[0].rule
        await eventually(lambda: len(feed.complete) >= 3 and not feed.running)
        seen = await look(http)
        assert seen["num_complete"] <= 3 + 1  # another one had begun
        assert seen["num_complete"] + seen["num_waiting"] == 30
        batches = [await take(http, drain=True) for _ in range(10)]
    assert sorted(each for batch in batches for each in ids(batch)) == sorted(f"q{i}" for i in range(30))
    assert "no more groups start before batches are taken" in batches[0]["warnings"][0]


async def test_races_hold_inside_a_feed(http, engine) -> None:
    engine.lengths = {0: 40, 1: 3, 2: 4, 3: 40}
    await make(http, batch=2, redundancy=2)
    await put(http, 0, 2)
    for group in (await take(http))["groups"]:
        assert [each["num_tokens"] for each in group["trajectories"]] == [3, 4]
        assert {each["state"] for each in group["candidates"]} == {"surplus"}


async def test_deferred_prompts_run_again_together_without_spare_candidates(app, http, engine) -> None:
    slow = {"q0", "q3"}
    candidate = engine._candidate

    def lengths(index, prompt, *rest):
        engine.lengths = dict.fromkeys(range(4), 60 if prompt.id in slow else 2)
        return candidate(index, prompt, *rest)

    engine._candidate, engine.step_s = lengths, 0.002
    await make(http, on_stale="defer", batch=2, redundancy=2)
    await put(http, 0, 12)
    batches: list[dict[str, Any]] = []
    for step in range(1, 7):
        batches.append(await take(http, drain=True))
        await update(app, engine, str(step))
    assert sorted(each for batch in batches for each in ids(batch)) == sorted(f"q{i}" for i in range(12))
    assert sorted(each for batch in batches for each in batch["deferred"]) == ["q0", "q3"]
    (long,) = [batch for batch in batches if "q0" in ids(batch)]
    assert ids(long) == ["q0", "q3"]
    assert all(len(group["trajectories"]) == 2 and not group["candidates"] for group in long["groups"])
    assert all(len(group["candidates"]) == 2 for group in batches[0]["groups"])
    assert max(batch["max_staleness"] for batch in batches) == 1
    feed = await look(http)
    assert (feed["num_deferred"], feed["totals"]["num_dropped"], feed["meter"]["admitted"]["num_groups"]) == (0, 0, 12)


async def test_groups_that_are_aborted_start_again(http, engine, monkeypatch) -> None:
    """As `/pause` does by vLLM's default, and `/abort_requests`: no prompt is at fault."""
    monkeypatch.setattr(live, "AGAIN_S", 0.01)
    engine.step_s, engine.lengths = 0.005, {0: 60, 1: 60}
    await make(http)
    await put(http, 0, 6)
    await eventually(lambda: engine.num_running == 12)
    engine.aborted |= set(engine.groups)
    batch = await take(http)
    assert (ids(batch), batch["failed"]) == (["q0", "q1", "q2"], [])
    assert batch["meter"]["failed"]["num_groups"] == 0


async def test_a_deleted_feed_gives_no_batch_to_those_who_wait_behind_another(http) -> None:
    await make(http)
    await put(http, 0, 2)
    first = asyncio.create_task(take(http, 404))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(take(http, 404, drain=True))
    await asyncio.sleep(0.01)
    assert (await http.delete("/v1/feeds/a")).status_code == 204
    assert "is not known here" in (await first)["message"]
    assert "is not known here" in (await second)["message"]


async def test_empty_batches_do_not_push_out_the_answer_of_another(http) -> None:
    await make(http)
    await put(http, 0, 3)
    first = await take(http, idempotency_key="k0")
    for number in range(3):
        assert (await take(http, drain=True, idempotency_key=f"end-{number}"))["groups"] == []
    assert await take(http, idempotency_key="k0") == first
    await take(http, 410, idempotency_key="end-0")


async def test_a_trainer_without_a_batch_is_told_of_prompts_that_are_gone(app, http, engine) -> None:
    engine.step_s, engine.weight_version = 60, "step-0"
    await make(http, on_stale="drop", max_staleness=0)
    await put(http, 0, 3)
    await update(app, engine, "step-1")
    message = (await take(http, 504, timeout_s=0.05))["message"]
    assert "no prompt waits. Since the last batch 3 prompts were dropped, 0 filtered, and 0 failed." in message

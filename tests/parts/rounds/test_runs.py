"""Runs and rounds over HTTP: what a trainer sees."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest

from tests.kernel.http.conftest import events_of
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.rounds.fakes import FakeRounds
from tests.support.waiting import WAIT_S, eventually
from vllm_rollout.parts.rounds.http.body import RoundRequest
from vllm_rollout.parts.rounds.http.live import Begun

TERMS = {"group_size": 2, "prompts_per_round": 4, "prompt_speculation": 1.5, "sampling_params": {"seed": 3}}
ROUNDS = "/v1/runs/a/rounds"


def prompts(first: int, count: int) -> list[dict[str, str]]:
    return [{"id": f"q{i}", "prompt": f"question {i}"} for i in range(first, first + count)]


async def make(http: httpx.AsyncClient, **fields: Any) -> dict:
    response = await http.post("/v1/runs", json={"id": "a", **TERMS, **fields})
    assert response.status_code == 201, response.text
    return response.json()


async def play(http: httpx.AsyncClient, status: int = 200, **body: Any) -> dict:
    response = await http.post(ROUNDS, json=body)
    assert response.status_code == status, response.text
    return response.json() if status == 200 else response.json()["error"]


async def look(http: httpx.AsyncClient) -> dict:
    return (await http.get("/v1/runs/a")).json()


def said(groups: list[dict]) -> dict[str, list[list[int]]]:
    return {group["prompt_id"]: [t["token_ids"] for t in group["trajectories"]] for group in groups}


async def test_a_prompt_says_the_same_in_every_round_of_an_epoch_and_something_else_in_the_next(http) -> None:
    await make(http, prompt_speculation=1.0, response_speculation=1.0)
    first, again, next_epoch = [
        said((await play(http, prompts=prompts(0, 4), epoch=epoch))["groups"]) for epoch in (1, 1, 2)
    ]
    assert first == again
    assert all(first[id] != next_epoch[id] for id in first)


async def test_a_lost_candidate_that_is_replaced_as_its_group_completes_costs_the_round_no_prompt(http, engine) -> None:
    engine.lengths, engine.failures = {0: 5, 1: 30, 2: 30}, {1: 5}
    await make(http, group_size=1, response_speculation=2)
    round = await play(http, prompts=prompts(0, 6))
    assert [group["prompt_id"] for group in round["groups"]] == ["q0", "q1", "q2", "q3"]


@pytest.mark.parametrize("fields", [{"filter": "zero_variance"}, {}])
async def test_a_filter_needs_two_rewards_of_a_prompt(http, fields) -> None:
    run = {"id": "a", **TERMS, "group_size": 1, **fields}
    response = await http.post("/v1/runs", json=run)
    if fields:
        assert (response.status_code, response.json()["error"]["param"]) == (400, "filter")
    else:
        error = await play(http, 400, prompts=prompts(0, 6), filter="zero_variance", stream=True)
        assert (error["param"], "one reward differs from none" in error["message"]) == ("filter", True)


async def test_who_leaves_a_round_that_waits_for_rewards_leaves_no_task(http, app) -> None:
    await make(http, filter="zero_variance", prompt_speculation=1.0)
    body = {"prompts": prompts(0, 4), "idempotency_key": "k", "stream": True}
    begun = await app.state.run_service.begin("a", RoundRequest.model_validate(body))
    before, complete = asyncio.all_tasks(), []

    async def read() -> None:
        async for event in begun.events:
            complete.extend([event] if event.type == "group" else [])

    reading = asyncio.create_task(read())
    await eventually(lambda: len(complete) >= 4, every_s=0.01)
    await asyncio.sleep(0.05)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    for _ in range(10):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before


async def test_a_deferred_prompt_says_in_its_long_round_what_a_rollout_says_by_the_same_seed(http) -> None:
    await make(http)
    rounds = [await play(http, prompts=prompts(6 * n, 6)) for n in range(2)]
    assert [round["kind"] for round in rounds] == ["short", "short"]
    late = said((await play(http))["groups"])
    body = {
        "prompts": [p for p in prompts(0, 12) if p["id"] in late],
        "group_size": 2,
        "sampling_params": TERMS["sampling_params"],
    }
    assert late == said((await http.post("/v1/rollouts", json=body)).json()["groups"])


async def test_a_run_is_made_once(http: httpx.AsyncClient) -> None:
    run = await make(http)
    assert (run["next_round"], run["num_fresh_prompts"], run["response_speculation"]) == ("short", 6, 1.25)
    assert (await http.post("/v1/runs", json={"id": "a", **TERMS})).status_code == 200
    response = await http.post("/v1/runs", json={"id": "a", **TERMS, "group_size": 3})
    assert response.status_code == 409
    assert "group_size 2, got 3" in response.json()["error"]["message"]
    assert [run["id"] for run in (await http.get("/v1/runs")).json()["data"]] == ["a"]
    assert (await http.delete("/v1/runs/a")).status_code == 204
    for method, path in (("GET", "/v1/runs/a"), ("DELETE", "/v1/runs/a"), ("POST", ROUNDS)):
        response = await http.request(method, path, json={} if method == "POST" else None)
        assert response.status_code == 404
        assert "run 'a' is not known here" in response.json()["error"]["message"]


@pytest.mark.parametrize(("fields", "param"), [
    ({"group_size": 0}, "group_size"), ({"group_size": 100}, "redundancy"),
    ({"prompts_per_round": 0}, "prompts_per_round"), ({"prompts_per_round": 2**20}, "prompts_per_round"),
    ({"prompt_speculation": 0.9}, "prompt_speculation"),
    ({"prompt_speculation": 17}, "prompt_speculation"), ({"response_speculation": "x"}, "response_speculation"),
    ({"queue_order": "last"}, "queue_order"), ({"id": "a/b"}, "id"), ({"id": ""}, "id"), ({"filter": "all"}, "filter"),
    ({"redundancy": 2, "response_speculation": 1.5}, "response_speculation"), ({"model": "another"}, "model"),
    ({"resume": 1}, "resume"),
    ({"sampling_params": {"temprature": 1}}, "sampling_params.temprature"), ({"stream": True}, "stream"),
    ({"selection": {"dual_end": {"num_longest": 2}}}, "selection.dual_end.num_longest"),
    ({"prompts_per_round": 16_384}, "prompts_per_round"),
    ({"prompts_per_round": 16_384, "prompt_speculation": 1.0, "group_size": 16}, "prompts_per_round"),
    ({"prompts_per_round": 16_384, "prompt_speculation": 1.0, "redundancy": 15}, "prompts_per_round"),
    ({"prompts_per_round": 13_000, "group_size": 9, "redundancy": "auto"}, "prompts_per_round"),
    ({"group_size": 300, "response_speculation": 16.0}, "response_speculation"),
])  # fmt: skip
async def test_fields_of_a_run_are_checked_when_it_is_made(http: httpx.AsyncClient, fields: dict, param: str) -> None:
    response = await http.post("/v1/runs", json={**TERMS, **fields})
    assert response.status_code in (404, 400), response.text
    assert response.json()["error"]["param"] == param
    assert (await http.get("/v1/runs")).json()["data"] == []


async def test_short_rounds_end_with_the_first_groups_and_a_long_one_with_all(http, engine: FakeEngine) -> None:
    engine.num_ranks = 2  # others are told of its end
    await make(http, response_speculation=2.0)
    answers = [await play(http, prompts=prompts(first, 6)) for first in (0, 6)]
    rounds = engine.part(FakeRounds)
    assert (len(rounds.launched_at_cuts), len(rounds.races)) == (2, 0)
    for answer in answers:
        assert (answer["kind"], len(answer["groups"]), len(answer["deferred"])) == ("short", 4, 2)
        assert {group["status"] for group in answer["groups"]} == {"complete"}
        assert {group["allocation"]["num_candidates"] for group in answer["groups"]} == {4}
        usage = answer["usage"]
        assert usage["generated_tokens"] == usage["returned_tokens"] + usage["wasted_tokens"]
        assert usage["num_deferred"] > 0
    run = await look(http)
    assert (run["next_round"], run["num_fresh_prompts"]) == ("long", 0)
    assert run["queue"] == [id for answer in answers for id in answer["deferred"]]
    long = await play(http)
    assert long["kind"] == "long"
    assert [group["prompt_id"] for group in long["groups"]] == run["queue"]
    assert {group["allocation"]["num_candidates"] for group in long["groups"]} == {2}
    assert long["usage"]["wasted_tokens"] == 0
    run = await look(http)
    assert run["totals"]["num_returned"] == run["totals"]["num_prompts"] == 12
    assert [record["kind"] for record in run["history"]] == ["short", "short", "long"]
    assert run["savings"]["round_tokens"] == sum(record["max_tokens"] for record in run["history"])
    metrics = (await http.get("/metrics")).text
    for row in ('rounds_total{kind="short"} 2.0', 'round_prompts_total{fate="returned"} 12.0',
                'round_prompts_total{fate="deferred"} 4.0', 'groups_total{status="deferred"} 4.0'):  # fmt: skip
        assert f"vllm_rollout:{row}" in metrics


async def test_a_stream_begins_with_its_round_and_ends_with_what_came_of_it(http: httpx.AsyncClient) -> None:
    await make(http)
    events = await events_of(http, ROUNDS, prompts=prompts(0, 6), idempotency_key="k")
    first, *middle, last = events
    assert (first["type"], first["round"], first["num_wanted"], first["idempotency_key"]) == ("round", 0, 4, "k")
    assert first["prompt_ids"] == [f"q{i}" for i in range(6)]
    returned = [event["prompt_id"] for event in middle if event["type"] == "group"]
    deferred = [event["prompt_id"] for event in middle if event["type"] == "deferred"]
    assert last["type"] == "done"
    assert sorted(returned + deferred) == sorted(first["prompt_ids"])
    assert sorted(deferred) == sorted(last["deferred"])
    again = await events_of(http, ROUNDS, idempotency_key="k")
    assert again[-1] == last
    assert [e["prompt_id"] for e in again if e["type"] == "group"] == [
        id for id in first["prompt_ids"] if id in returned
    ]


async def test_a_key_means_one_round(http: httpx.AsyncClient) -> None:
    await make(http)
    body = {"prompts": prompts(0, 6), "idempotency_key": "k"}
    first = await http.post(ROUNDS, json=body)
    for again in (body, {"idempotency_key": "k"}):
        assert (await http.post(ROUNDS, json=again)).content == first.content
    error = await play(http, 409, prompts=prompts(6, 6), idempotency_key="k")
    assert "the key of another round" in error["message"]
    error = await play(http, 409, idempotency_key="k", kind="long")
    assert error["param"] == "idempotency_key"
    await play(http, prompts=prompts(6, 6), idempotency_key="l")
    await play(http, idempotency_key="m")
    error = await play(http, 410, idempotency_key="k")
    assert "its answer is not kept any more" in error["message"]
    assert "Answers are kept of 'l', 'm'. Take a new key" in error["message"]
    assert (await look(http))["num_rounds"] == 3


async def test_rounds_come_one_at_a_time(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.step_s = 0.005
    await make(http)
    first = asyncio.create_task(play(http, prompts=prompts(0, 6), idempotency_key="first"))
    await eventually(lambda: engine.num_running, every_s=0.005)
    run = await look(http)
    assert (run["open_round"]["state"], run["open_round"]["idempotency_key"]) == ("running", "first")
    for body in ({"prompts": prompts(6, 6)}, {"idempotency_key": "first"}):
        response = await http.post(ROUNDS, json=body)
        assert response.status_code == 409
        assert response.headers["retry-after"] == "1"
        assert "round 0 of run 'a' is running" in response.json()["error"]["message"]
    assert (await http.delete("/v1/runs/a")).status_code == 409
    assert (await http.delete(f"{ROUNDS}/0")).status_code == 409
    assert len((await first)["groups"]) == 4


async def interrupt(http: httpx.AsyncClient, engine: FakeEngine, **body: Any) -> None:
    """A client that leaves in the midst of its round."""
    engine.step_s = 0.005
    leaving = asyncio.create_task(http.post(ROUNDS, json=body))
    await eventually(lambda: engine.num_running, every_s=0.005)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    engine.step_s = 0.0
    async with asyncio.timeout(WAIT_S):
        while (await look(http))["open_round"]["state"] == "running":
            await asyncio.sleep(0.01)


async def test_a_round_that_was_interrupted_runs_anew_under_its_key(http, engine):
    await make(http)
    body = {"prompts": prompts(0, 6), "idempotency_key": "k", "sampling_params": {"max_tokens": 7}}
    await interrupt(http, engine, **body)
    assert engine.num_running == 0
    error = await play(http, 409, prompts=prompts(6, 6), idempotency_key="other")
    assert "round 0 of this run is open under the key 'k', got 'other'" in error["message"]
    answer = await play(http, idempotency_key="k")
    returned = {group["prompt_id"] for group in answer["groups"]}
    assert returned | {*answer["deferred"], *answer["unstarted"]} == {f"q{i}" for i in range(6)}
    # Asked for by its key alone, it is the round that it was.
    assert max(t["num_tokens"] for group in answer["groups"] for t in group["trajectories"]) <= 7


async def test_a_round_that_is_given_up_puts_its_prompts_back(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    await make(http)
    await interrupt(http, engine, prompts=prompts(0, 6), idempotency_key="k")
    assert (await http.delete(f"{ROUNDS}/1")).status_code == 404
    run = (await http.delete(f"{ROUNDS}/0")).json()
    assert (run["unstarted"], run["num_fresh_prompts"], run["open_round"]) == ([f"q{i}" for i in range(6)], 0, None)
    assert "was given up" in (await play(http, 410, idempotency_key="k"))["message"]
    answer = await play(http)
    assert len(answer["groups"]) == 4


@pytest.mark.parametrize(("body", "words"), [
    ({"prompts": prompts(0, 5)}, "wants 6 fresh prompts .* got 5"),
    ({"prompts": prompts(0, 7)}, "got 7"),
    ({}, "got 0"),
    ({"prompts": prompts(0, 5), "kind": "long"}, "at most 4 prompts, got 5"),
    ({"prompts": [*prompts(0, 5), *prompts(0, 1)]}, "'q0' is used twice"),
    ({"prompts": [{"prompt": "no id"}, *prompts(0, 5)]}, "prompts.0.id"),
    ({"prompts": prompts(0, 6), "stream_tokens": 4}, "stream_tokens"),
    ({"prompts": prompts(0, 6), "filter": "zero_variance"}, "stream: a round that filters needs true"),
    ({"prompts": prompts(0, 6), "group_size": 3}, "group_size"),
    ({"prompts": prompts(0, 6), "sampling_params": {"seed": "x"}}, "sampling_params.seed"),
])  # fmt: skip
async def test_a_round_that_is_refused_takes_nothing(http: httpx.AsyncClient, body: dict, words: str) -> None:
    before = await make(http)
    error = await play(http, 400, **body)
    assert re.search(words, f"{error['param']}: {error['message']}"), error
    assert await look(http) == before


async def test_a_prompt_that_waits_is_known_by_its_epoch(http: httpx.AsyncClient) -> None:
    await make(http)
    first = await play(http, prompts=prompts(0, 6), epoch=1)
    late = first["deferred"][0]
    again = [{"id": late, "prompt": f"question {late[1:]}"}, *prompts(6, 5)]
    error = await play(http, 409, prompts=again, epoch=1)
    assert f"'{late}' of epoch 1 waits in this run already" in error["message"]
    other = [{"id": late, "prompt": "another question"}, *prompts(6, 5)]
    assert "with another content" in (await play(http, 409, prompts=other, epoch=2))["message"]
    await play(http, prompts=again, epoch=2)


async def rewarded(http: httpx.AsyncClient, flat: set[str], **body: Any) -> tuple[dict, list[str]]:
    """A streamed round whose trainer posts rewards as groups come; those of `flat` prompts are all the same.

    Over a pair of queues, since the test's transport gives a stream only when it is whole.
    """
    app = http._transport.app  # type: ignore[attr-defined]
    begun = await app.state.run_service.begin("a", RoundRequest.model_validate({**body, "stream": True}))
    told: list[str] = []
    async for event in begun.events:
        if event.type == "group":
            values = [1.0 if event.prompt_id in flat else float(i) for i, _ in enumerate(event.selected)]
            rewards = [
                {"prompt_id": event.prompt_id, "index": index, "reward": value}
                for index, value in zip(event.selected, values, strict=True)
            ]
            for one in ([reward] for reward in rewards):
                url = f"/v1/rollouts/{begun.live.rollout.id}/rewards"
                response = await http.post(url, json={"rewards": one, "filter": "zero_variance"})
                assert response.status_code == 200, response.text
                told += response.json()["filtered"]
                assert response.json()["counts"]["accepted"] == 1
                assert (await http.post(url, json={"rewards": one})).json()["counts"]["duplicate"] == 1
        last = event
    return last.model_dump(), told


async def test_a_group_is_told_before_it_is_filtered_also_where_its_rewards_came_first(http: httpx.AsyncClient) -> None:
    await make(http, filter="zero_variance", redundancy=0)
    app = http._transport.app  # type: ignore[attr-defined]
    body = RoundRequest.model_validate({"prompts": prompts(0, 6), "reserve": prompts(6, 5), "stream": True})
    begun = await app.state.run_service.begin("a", body)
    told: list[tuple[str, str]] = []
    async for event in begun.events:
        if event.type == "trajectory":
            reward = {"prompt_id": event.prompt_id, "index": event.trajectory.index, "reward": 1.0}
            url = f"/v1/rollouts/{begun.live.rollout.id}/rewards"
            (await http.post(url, json={"rewards": [reward]})).raise_for_status()
        elif event.type in ("group", "filtered"):
            told.append((event.type, event.prompt_id))
    filtered = [id for type, id in told if type == "filtered"]
    assert filtered
    assert all(told.index(("group", id)) < told.index(("filtered", id)) for id in filtered)


async def test_rewards_by_the_names_of_groups_filter_too(http: httpx.AsyncClient) -> None:
    await make(http, filter="zero_variance")
    app = http._transport.app  # type: ignore[attr-defined]
    body = {"prompts": prompts(0, 6), "reserve": prompts(6, 5), "stream": True}
    begun = await app.state.run_service.begin("a", RoundRequest.model_validate(body))
    num_flat = 0
    async for event in begun.events:
        if event.type == "group" and num_flat < 2:
            num_flat += 1
            named = [{"group_id": event.group_id, "index": index, "reward": 1.0} for index in event.selected]
            named.append({"request_id": "cmpl-1", "reward": 1.0})
            counts = (await http.post("/v1/rewards", json={"rewards": named})).json()["counts"]
            assert (counts["accepted"], counts["unknown"]) == (len(event.selected), 1)
        elif event.type == "group":
            rewards = [{"prompt_id": event.prompt_id, "index": i, "reward": float(i)} for i in event.selected]
            await http.post(f"/v1/rollouts/{begun.live.rollout.id}/rewards", json={"rewards": rewards})
        last = event
    assert len(last.filtered) == 2, "all rewards of these groups were the same"


async def test_a_filter_that_is_not_there_is_a_conflict(http: httpx.AsyncClient) -> None:
    await make(http)
    answer = await play(http, prompts=prompts(0, 6))
    reward = {"prompt_id": "q0", "index": 0, "reward": 1.0}
    url = f"/v1/rollouts/{answer['id']}/rewards"
    response = await http.post(url, json={"rewards": [reward], "filter": "zero_variance"})
    assert response.status_code == 409
    assert "is no round on its way that filters" in response.json()["error"]["message"]


@pytest.mark.parametrize("fields", [
    {"redundancy": 2}, {"selection": {"dual_end": {"num_longest": 1}}}, {"selection": "shortest"},
    {"early_stop": False},
])  # fmt: skip
async def test_what_a_rollout_can_do_works_inside_rounds(http: httpx.AsyncClient, fields: dict) -> None:
    await assert_rounds_work(http, fields)


async def assert_rounds_work(http: httpx.AsyncClient, fields: dict) -> None:
    await make(http, **fields)
    for first in (0, 6):
        answer = await play(http, prompts=prompts(first, 6))
        assert (len(answer["groups"]), len(answer["deferred"])) == (4, 2)
        assert {group["status"] for group in answer["groups"]} == {"complete"}
    long = await play(http)
    assert {group["allocation"]["num_candidates"] for group in long["groups"]} == {2}
    assert all(len(group["trajectories"]) == 2 for group in long["groups"])


async def filtering_round(http: httpx.AsyncClient, **fields: Any) -> Begun:
    await make(http, filter="zero_variance", **fields)
    app = http._transport.app  # type: ignore[attr-defined]
    body = {"prompts": prompts(0, 4), "stream": True}
    return await app.state.run_service.begin("a", RoundRequest.model_validate(body))


async def rewarded_with(
    http: httpx.AsyncClient, begun: Begun, prompt_id: str, *rewards: tuple[int, float]
) -> list[str]:
    """Statuses of posted rewards."""
    body = {"rewards": [{"prompt_id": prompt_id, "index": index, "reward": reward} for index, reward in rewards]}
    response = await http.post(f"/v1/rollouts/{begun.live.rollout.id}/rewards", json=body)
    assert response.status_code == 200, response.text
    return [result["status"] for result in response.json()["results"]]


async def test_rewards_of_an_attempt_that_is_void_count_for_nothing(http, engine):
    """A trainer that rewards trajectories as they come, of a group whose rank dies then: what counts is the group that
    was returned."""
    engine.lengths, engine.losses = {0: 4, 1: 12}, {"q0": 8}
    begun = await filtering_round(http, prompt_speculation=1.0, response_speculation=1.0, on_engine_failure="retry")
    is_void = True
    async for event in begun.events:
        match event.type, getattr(event, "prompt_id", None):
            case "trajectory", "q0" if is_void:
                assert await rewarded_with(http, begun, "q0", (event.trajectory.index, 1.0)) == ["accepted"]
            case "restarted", "q0":
                is_void = False
                assert await rewarded_with(http, begun, "q0", (0, 1.0)) == ["unfinished"]
            case "group", "q0":
                assert await rewarded_with(http, begun, "q0", (0, 0.0), (1, 0.0)) == ["accepted", "accepted"]
            case "group", other:
                await rewarded_with(http, begun, other, *enumerate([0.0, 1.0]))
    assert not is_void
    assert event.filtered == ["q0"]


async def test_rewards_of_candidates_that_there_are_not_are_not_kept(http: httpx.AsyncClient) -> None:
    begun = await filtering_round(http, prompt_speculation=1.0, response_speculation=2.0)
    async for event in begun.events:
        if event.type == "round":
            assert await rewarded_with(http, begun, "q0", (0, 1.0), (2**62, 1.0)) == ["unfinished"] * 2
        if event.type == "group":
            selected = set(event.selected)
            statuses = await rewarded_with(
                http, begun, event.prompt_id, *((index, float(index)) for index in (*range(4), 4, 2**62))
            )
            ends = ["accepted" if index in selected else "unfinished" for index in range(4)]
            assert statuses == [*ends, "unknown", "unknown"]
    course = begun.live.course
    assert {len(rewards) for rewards in course._rewards.values()} == {2}


@pytest.mark.parametrize(
    ("said", "is_repeat"),
    [
        ({}, True),
        ({"prompts": [], "epoch": None, "stream": True}, True),
        ({"include": []}, False),
        ({"epoch": 0}, False),
    ],
)
def test_a_repeat_says_its_key_alone(said: dict, is_repeat: bool) -> None:
    assert RoundRequest.model_validate({"idempotency_key": "k", **said}).is_repeat is is_repeat


async def test_a_reserve_has_its_bounds(http: httpx.AsyncClient) -> None:
    await make(http, filter="zero_variance")
    before = await look(http)
    error = await play(http, 400, prompts=prompts(0, 6), reserve=prompts(6, 16_379), stream=True)
    assert "at most 16384 prompts, its reserve included, and begins with 6, got 16379 in reserve" in error["message"]
    assert "Send at most 16378" in error["message"]
    assert await look(http) == before

"""POST /v1/rollouts keeps the contract of docs/reference/http.md, streamed or not."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import closing
from itertools import combinations, pairwise
from typing import Any

import httpx
import pytest

from tests.kernel.http.fake_engine import FakeEngine
from tests.support.waiting import wait_until
from vllm_rollout import RolloutClient
from vllm_rollout.kernel.http.answers import (
    CandidateEvent,
    DoneEvent,
    Event,
    GroupEvent,
    GroupLengths,
    RolloutAnswer,
    TokensEvent,
    TrajectoryEvent,
)
from vllm_rollout.kernel.http.started_group import lengths_of

PROMPTS = [{"id": "a", "prompt": "one"}, {"id": "b", "prompt_token_ids": [1, 2, 3]}, {"prompt": "three"}]
ENDLESS = {"min_tokens": 4000}


def body(**fields: Any) -> dict[str, Any]:
    return {"prompts": PROMPTS, "group_size": 4, "redundancy": 4, "sampling_params": {"seed": 7}, **fields}


async def post(http: httpx.AsyncClient, **fields: Any) -> RolloutAnswer:
    response = await http.post("/v1/rollouts", json=body(**fields))
    assert response.status_code == 200, response.text
    return RolloutAnswer.model_validate_json(response.content)


def all_indices(answer: RolloutAnswer, position: int) -> list[int]:
    group = answer.groups[position]
    return sorted([t.index for t in group.trajectories] + [c.index for c in group.candidates])


async def test_complete_group_has_exactly_group_size_trajectories_in_index_order(http):
    answer = await post(http)
    assert [group.prompt_id for group in answer.groups] == ["a", "b", "2"]
    for position, group in enumerate(answer.groups):
        indices = [t.index for t in group.trajectories]
        assert (group.status, group.reason, len(indices)) == ("complete", None, 4)
        assert indices == sorted(indices)
        assert all_indices(answer, position) == list(range(8))
        assert group.allocation.num_candidates == 8
        tokens = [t.num_tokens for t in group.trajectories]
        assert (group.lengths.max, group.lengths.mean) == (max(tokens), pytest.approx(sum(tokens) / 4))
    assert answer.groups[1].prompt_token_ids == [1, 2, 3]
    assert len({group.group_id for group in answer.groups}) == 3
    assert answer.usage.prompt_tokens == sum(len(group.prompt_token_ids) for group in answer.groups)
    assert answer.timing.latency_s >= answer.timing.time_to_first_group_s > 0


@pytest.mark.parametrize(
    ("num_tokens", "lengths"), [([2, 4, 4, 4, 5, 5, 7, 9], (5.0, 2.0, 9)), ([7], (7, 0, 7)), ([], (0, 0, 0))]
)
def test_lengths_are_mean_population_deviation_and_maximum(num_tokens, lengths):
    mean, std, most = lengths
    assert lengths_of(num_tokens) == GroupLengths(mean=mean, std=std, max=most)


async def test_equal_prompts_and_following_seeds_have_answers_of_their_own(http):
    said = []
    for seed, ids in ((1, ("a", "b")), (2, ("a", "b")), (1, (None, None))):
        prompts = [{"id": id, "prompt": "same"} for id in ids]
        answer = await post(http, prompts=prompts, redundancy=0, sampling_params={"seed": seed})
        said += [tuple(t.token_ids) for group in answer.groups for t in group.trajectories]
    assert len(set(said)) == len(said) == 24
    again = await post(http, prompts=[{"id": "b", "prompt": "same"}], redundancy=0, sampling_params={"seed": 1})
    assert [tuple(t.token_ids) for t in again.groups[0].trajectories] == said[4:8], "wherever it stands"


@pytest.mark.parametrize(
    ("sampling", "sizes", "warned"),
    [
        ({"temperature": 0}, (4, 0), "sampling_params.temperature: with 0 all 4"),
        ({"temperature": 0.0}, (1, 2), "sampling_params.temperature: with 0.0 all 3"),
        ({"top_k": 1}, (2, 0), "sampling_params.top_k: with 1 all 2"),
        ({"temperature": 0}, (1, 0), None),
        ({"temperature": 0.1}, (4, 4), None),
        ({}, (4, 4), None),
    ],
)
async def test_candidates_that_cannot_differ_are_warned_of(http, sampling, sizes, warned):
    group_size, redundancy = sizes
    answer = await post(http, sampling_params=sampling, group_size=group_size, redundancy=redundancy)
    assert [warning[: len(warned or "")] for warning in answer.warnings] == ([warned] if warned else [])


async def test_more_tokens_than_the_context_has_are_warned_of(http, engine: FakeEngine):
    engine.max_model_len = 100
    fits, cut = [await post(http, sampling_params={"max_tokens": most}) for most in (100, 101)]
    assert fits.warnings == []
    (warning,) = cut.warnings
    assert warning.startswith("sampling_params.max_tokens: 101 tokens do not fit")
    assert "context of 100 tokens" in warning


async def test_dual_end_returns_the_shortest_and_the_longest(http, engine: FakeEngine):
    engine.lengths = {i: 5 * (i + 1) for i in range(8)}
    answer = await post(http, selection={"dual_end": {"num_longest": 1}})
    for group in answer.groups:
        assert [t.num_tokens for t in group.trajectories] == [5, 10, 15, 40]
        assert {c.state for c in group.candidates} == {"finished"}


WORDS = ("text", "logprobs", "stopped")


@pytest.mark.parametrize("words", [None, *(c for n in range(4) for c in combinations(WORDS, n)), ("stopped", "text")])
async def test_an_answer_has_what_include_names(http, words: tuple[str, ...] | None):
    answer = (await http.post("/v1/rollouts", json=body(**({} if words is None else {"include": words})))).json()
    included = ("logprobs",) if words is None else words
    for group in answer["groups"]:
        for each in (*group["trajectories"], *(group["candidates"] if "stopped" in included else ())):
            assert (each["logprobs"] is not None) == ("logprobs" in included)
            assert len(each["token_ids"]) == len(each["logprobs"] or each["token_ids"]) == each["num_tokens"]
            assert (each["text"] is not None) == ("text" in included)
        if "stopped" not in included:
            fields = {"token_ids", "logprobs", "text"}
            assert all(candidate.keys().isdisjoint(fields) for candidate in group["candidates"])


async def test_engine_death_is_a_503_in_error_form(http, engine: FakeEngine):
    engine.dies_at_step = 1
    response = await http.post("/v1/rollouts", json=body())
    assert response.status_code == 503
    error = response.json()["error"]
    assert "restart the server" in error["message"]
    assert (error["code"], error["type"]) == (503, "ServiceUnavailable")
    assert engine.num_running == 0


async def test_a_bug_is_a_500_in_error_form(http, app):
    app.state.rollout_service = None
    response = await http.post("/v1/rollouts", json=body())
    assert response.status_code == 500
    assert "AttributeError" in response.json()["error"]["message"]


def stream(client: RolloutClient, **fields: Any) -> list[Event]:
    arguments = {"prompts": PROMPTS, "group_size": 4, "redundancy": 4, "sampling_params": {"seed": 7}, **fields}
    return list(client.stream(**arguments))


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 1000])
def test_token_chunks_have_the_asked_size_no_gaps_and_add_up(client, num_tokens):
    events = stream(client, stream_tokens=num_tokens, include=["logprobs", "stopped"])
    chunks: dict[tuple[str, int], list[TokensEvent]] = {}
    for event in events:
        if isinstance(event, TokensEvent):
            chunks.setdefault((event.prompt_id, event.index), []).append(event)
    for parts in chunks.values():
        assert all(len(part.token_ids) >= num_tokens for part in parts[:-1])
        assert parts[0].offset == 0
        assert all(b.offset == a.offset + len(a.token_ids) for a, b in pairwise(parts))
    ended = {(e.prompt_id, e.trajectory.index): e.trajectory for e in events if isinstance(e, TrajectoryEvent)}
    ended |= {(e.prompt_id, e.candidate.index): e.candidate for e in events if isinstance(e, CandidateEvent)}
    assert chunks.keys() == ended.keys()
    for key, end in ended.items():
        assert [t for part in chunks[key] for t in part.token_ids] == end.token_ids
        assert [p for part in chunks[key] for p in part.logprobs] == end.logprobs


def test_stream_is_server_sent_events(server_url):
    with httpx.stream("POST", f"{server_url}/v1/rollouts", json=body(stream=True)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = response.read().decode().split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


@pytest.mark.parametrize("stream_tokens", [None, 1])
def test_client_that_leaves_a_stream_aborts_its_candidates_and_no_others(client, engine: FakeEngine, stream_tokens):
    engine.step_s = 0.001
    engine.lengths = {0: 3}
    with closing(client.stream(["other"], 2, sampling_params={"min_tokens": 1500}, stream_tokens=1)) as other:
        next(other)
        sampling = {"seed": 1}
        engine.lengths = {0: 3, **dict.fromkeys(range(1, 8), 4000)}
        with closing(client.stream(PROMPTS, 4, 4, sampling_params=sampling, stream_tokens=stream_tokens)) as events:
            next(events)
            assert engine.num_running > 2
        wait_until(lambda: engine.num_running == 2)
        assert engine.num_aborted >= 21
        num_aborted = engine.num_aborted
        assert isinstance([*other][-1], DoneEvent)
    assert (engine.num_running, engine.num_aborted) == (0, num_aborted)


def test_candidates_of_a_client_that_leaves_are_counted(client, server_url, engine):
    engine.lengths = {0: 3, **dict.fromkeys(range(1, 4), 4000)}
    engine.step_s = 0.001
    with closing(client.stream([{"id": "q", "prompt": "p"}], 4, stream_tokens=5)) as events:
        next(event for event in events if event.type == "tokens" and event.offset >= 20)
    wait_until(lambda: engine.num_running == 0)
    metrics = httpx.get(f"{server_url}/metrics").text
    assert metrics.count('vllm_rollout:candidates_total{state="deferred"} 3.0') == 1
    assert metrics.count('vllm_rollout:clients_left_total{request="rollout"} 1.0') == 1


async def test_one_failed_candidate_does_not_fail_its_group(http, engine: FakeEngine):
    engine.lengths = {i: 5 * (i + 1) for i in range(8)}
    engine.failures = {0: 2}
    answer = await post(http)
    assert answer.usage.num_failed == 3
    for group in answer.groups:
        assert group.status == "complete"
        assert [t.index for t in group.trajectories] == [1, 2, 3, 4]
        assert (group.candidates[0].state, group.candidates[0].num_tokens) == ("failed", 2)


async def test_incomplete_group_says_why_and_returns_what_there_is(http, engine: FakeEngine):
    engine.lengths = dict.fromkeys(range(4), 10)
    engine.failures = {0: 2, 1: 3}
    answer = await post(http, redundancy=0)
    for position, group in enumerate(answer.groups):
        assert group.status == "incomplete"
        assert [t.index for t in group.trajectories] == [2, 3]
        assert "2 of 4" in group.reason
        assert "2 failed" in group.reason
        assert all_indices(answer, position) == [0, 1, 2, 3]


def test_stream_names_trajectories_and_candidates_before_their_group_and_ends_with_done(client):
    events = stream(client)
    assert [type(event) for event in events].count(DoneEvent) == 1
    assert isinstance(events[-1], DoneEvent)
    over: set[str] = set()
    named: dict[str, list[int]] = {}
    for event in events[:-1]:
        assert event.prompt_id not in over
        if isinstance(event, GroupEvent):
            over.add(event.prompt_id)
            assert sorted(named[event.prompt_id]) == event.selected
        elif isinstance(event, TrajectoryEvent):
            named.setdefault(event.prompt_id, []).append(event.trajectory.index)
    assert over == {"a", "b", "2"}


def test_stream_has_the_content_of_the_answer(client):
    arguments = {"prompts": PROMPTS, "group_size": 4, "redundancy": 4, "sampling_params": {"seed": 7}}
    arguments |= {"include": ["text", "logprobs", "stopped"]}
    answer = client.rollout(**arguments)
    events = list(client.stream(**arguments))
    for group in answer.groups:
        mine = [event for event in events[:-1] if event.prompt_id == group.prompt_id]
        trajectories = [event.trajectory for event in mine if isinstance(event, TrajectoryEvent)]
        candidates = [event.candidate for event in mine if isinstance(event, CandidateEvent)]
        assert sorted(trajectories, key=lambda t: t.index) == group.trajectories
        assert sorted(candidates, key=lambda c: c.index) == group.candidates
        (over,) = [event for event in mine if isinstance(event, GroupEvent)]
        for name in ("status", "reason", "prompt_token_ids", "lengths", "allocation"):
            assert getattr(over, name) == getattr(group, name)
    assert events[-1].usage == answer.usage
    assert (events[-1].model, events[-1].weight_version) == (answer.model, answer.weight_version)


def test_engine_death_is_the_last_event_of_a_stream(server_url, engine: FakeEngine):
    engine.dies_at_step = 3
    response = httpx.post(f"{server_url}/v1/rollouts", json=body(stream=True, stream_tokens=1))
    assert response.status_code == 200
    *_, last = response.text.strip().split("\n\n")
    assert last.startswith("event: error\n")
    assert json.loads(last.split("data: ")[1])["error"]["code"] == 503
    assert engine.num_running == 0


def test_client_that_leaves_while_waiting_aborts_its_candidates_and_no_others(server_url, engine: FakeEngine):
    engine.step_s = 0.001

    async def leave_one_of_two() -> httpx.Response:
        async with httpx.AsyncClient(base_url=server_url, timeout=30) as http:
            other = asyncio.create_task(http.post("/v1/rollouts", json=body(sampling_params={"min_tokens": 400})))
            await asyncio.to_thread(wait_until, lambda: engine.num_launched == 24)
            waiting = asyncio.create_task(http.post("/v1/rollouts", json=body(sampling_params=ENDLESS)))
            await asyncio.to_thread(wait_until, lambda: engine.num_launched == 48)
            waiting.cancel()
            await asyncio.to_thread(wait_until, lambda: engine.num_aborted == 24)
            return await other

    response = asyncio.run(leave_one_of_two())
    assert response.status_code == 200
    assert all(group["status"] == "complete" for group in response.json()["groups"])
    assert (engine.num_running, engine.num_aborted) == (0, 24)


def test_many_rollouts_at_once_keep_apart(server_url, engine: FakeEngine):
    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server_url, timeout=30) as http:
            bodies = [body(sampling_params={"seed": seed % 4}) for seed in range(16)]
            return await asyncio.gather(*(http.post("/v1/rollouts", json=b) for b in bodies))

    answers = [RolloutAnswer.model_validate_json(response.content) for response in asyncio.run(run())]
    tokens = [str([[t.token_ids for t in g.trajectories] for g in answer.groups]) for answer in answers]
    assert sorted(Counter(tokens).values()) == [4, 4, 4, 4]
    assert engine.num_launched == engine.num_ended == 16 * 24

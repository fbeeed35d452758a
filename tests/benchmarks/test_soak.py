"""The parts of the soak that need no engine: what it sends, and that its checks see what is wrong."""

from __future__ import annotations

from random import Random
from typing import Any

import httpx
import pytest

from benchmarks.soak import bodies
from benchmarks.soak.checks import rollout_problems, stream_problems
from benchmarks.soak.memory import MemorySamples, growth_mib
from benchmarks.soak.tally import MAX_VIOLATIONS, Tally
from tests.kernel.http.conftest import make_app
from tests.kernel.http.fake_engine import FakeEngine
from vllm_rollout.kernel.client.connection import EventData, EventReader
from vllm_rollout.kernel.http.answers import RolloutAnswer


async def post(body: Any) -> httpx.Response:
    transport = httpx.ASGITransport(make_app(FakeEngine()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return await http.post("/v1/rollouts", json=body)


def body_of(seed: int, **fields: Any) -> dict[str, Any]:
    body = bodies.rollout(Random(seed), "c0-1", **fields)
    del body["sampling_params"]["stop_token_ids"]  # the fake engine has none
    return body


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(8))
async def test_a_right_answer_passes_every_check(seed: int):
    body = body_of(seed)
    answer = await post(body)
    assert answer.status_code == 200, answer.text
    assert list(rollout_problems(body, RolloutAnswer.model_validate_json(answer.content))) == []
    body = {**body, "stream": True, "stream_tokens": 1}
    reader = EventReader(streams_tokens=True)
    events = [reader.read(data) for data in EventData().feed((await post(body)).content)]
    assert list(stream_problems(body, events)) == []
    assert list(stream_problems(body, events[:-1])) == [
        f"the stream ended without done, after {len(events) - 1} events"
    ]
    first = next(event for event in events if event.type == "trajectory")
    assert list(stream_problems(body, [event for event in events if event is not first]))


def spoilt(answer: dict[str, Any], what: str) -> None:
    group = answer["groups"][0]
    match what:
        case "a trajectory less":
            group["trajectories"].pop()
        case "incomplete":
            group["status"] = "incomplete"
        case "another's tokens":
            group["prompt_token_ids"].append(7)
        case "another's id":
            group["prompt_id"] = "c1-1-0"
        case "accounts":
            answer["usage"]["wasted_tokens"] += 1
        case "length":
            group["trajectories"][0]["token_ids"].append(7)
        case "order":
            group["trajectories"].reverse()


@pytest.mark.anyio
@pytest.mark.parametrize(
    "what", ["a trajectory less", "incomplete", "another's tokens", "another's id", "accounts", "length", "order"]
)
async def test_a_wrong_answer_is_seen(what: str):
    body = body_of(1, group_size=3, redundancy=1)
    answer = (await post(body)).json()
    spoilt(answer, what)
    assert list(rollout_problems(body, RolloutAnswer.model_validate(answer)))


def test_draws_are_repeatable_and_spoil_what_they_should():
    data = b'{"version": 12}' * 10
    for spoil in (bodies.mutated, bodies.mutated_text):
        assert spoil(Random(3), data) == spoil(Random(3), data) != data
    assert bodies.rollout(Random(5), "a") == bodies.rollout(Random(5), "a")
    assert bodies.mutated_text(Random(1), b"no digits") == b"no digits"


def test_growth_is_counted_from_after_the_warm_up():
    assert growth_mib([100.0 + 10 * min(i, 10) for i in range(100)]) == 0
    assert growth_mib([float(i) for i in range(100)]) > 60
    samples = MemorySamples()
    for i in range(100):
        samples.add({"1 python": 100.0, "2 engine": float(i), **({"3 g++": 5.0} if i < 3 else {})})
    assert samples.growth_by_process == {"0 API": 0.0, "1 engine": growth_mib([float(i) for i in range(100)])}


def test_every_violation_is_counted_and_the_first_are_told():
    tally = Tally()
    tally.answered("votes", 200, (200,), "")
    tally.answered("votes", 503, (200, 400), "no engine")
    for i in range(MAX_VIOLATIONS):
        tally.broken("votes", f"number {i}")
    told = tally.as_json()
    assert told["num_answers_500_or_above"] == 1
    assert told["violations"][0] == "votes: answered 503, allowed (200, 400): no engine"
    assert (told["num_violations"], len(told["violations"])) == (MAX_VIOLATIONS + 1, MAX_VIOLATIONS)

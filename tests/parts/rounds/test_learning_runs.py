"""Runs that prune or choose the number of candidates, and runs that go along with a saved state."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.rounds.test_runs import ROUNDS, assert_rounds_work, interrupt, look, make, play, prompts
from tests.support.waiting import eventually

STATE = "/v1/rollouts/state"


@pytest.mark.parametrize("fields", [{"redundancy": "auto"}, {"pruning": {"detection_length": 4, "keep_ratio": 0.5}}])
async def test_what_learns_works_inside_rounds(http: httpx.AsyncClient, fields: dict) -> None:
    await assert_rounds_work(http, fields)


async def test_a_state_is_not_taken_while_a_round_runs(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.step_s = 0.005
    await make(http)
    round = asyncio.create_task(play(http, prompts=prompts(0, 6)))
    await eventually(lambda: engine.num_running, every_s=0.005)
    assert (await http.put(STATE, content=(await http.get(STATE)).content)).status_code == 409
    assert len((await round)["groups"]) == 4


async def test_several_detection_lengths_are_compared_in_a_run_too(http) -> None:
    await make(http, pruning={"detection_length": [4, 8]})
    assert len((await play(http, prompts=prompts(0, 6)))["groups"]) == 4


async def test_a_key_is_known_however_many_rounds_came_after_it(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    await make(http, prompts_per_round=1, prompt_speculation=1.0)
    await interrupt(http, engine, prompts=prompts(100, 1), idempotency_key="given up")
    await http.delete(f"{ROUNDS}/0")
    for number in range(70):
        fresh = prompts(number, (await look(http))["num_fresh_prompts"])
        await play(http, prompts=fresh, idempotency_key=f"key-{number}")
    before = await look(http)
    for _ in range(2):
        for key, words in (("key-1", "was round 1 of this run"), ("given up", "its prompts wait")):
            for body in ({}, {"prompts": prompts(1, 1)}):
                error = await play(http, 410, idempotency_key=key, **body)
                assert words in error["message"]
                assert "Take a new key" in error["message"]
        assert await look(http) == before
        state = (await http.get(STATE)).content  # carries them to another server
        assert (await http.put(STATE, content=state)).status_code == 204

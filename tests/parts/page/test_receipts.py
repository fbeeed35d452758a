"""Receipts in answers, events, rounds, runs and traces."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.http.conftest import events_of, http_of, make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.rounds.test_runs import look, make, play, prompts
from vllm_rollout.parts.page.http.recorder import TraceRecorder
from vllm_rollout.parts.page.recording.file import read_trace
from vllm_rollout.parts.page.recording.rows import RolloutRow

TOKENS = ("generated_tokens", "returned_tokens", "wasted_tokens", "resumed_tokens")


def body(**fields: Any) -> dict[str, Any]:
    return {"prompts": prompts(0, 3), "group_size": 2, "redundancy": 2, "sampling_params": {"max_tokens": 60}, **fields}


async def test_an_answer_a_stream_and_the_trace_have_it(engine: FakeEngine, tmp_path: Path) -> None:
    engine.lengths, engine.step_s = {0: 40, 1: 10, 2: 25, 3: 20}, 0.001
    path = tmp_path / "trace.jsonl"
    async with http_of(make_app(engine, recorder=TraceRecorder(path))) as http:
        answer = (await http.post("/v1/rollouts", json=body())).json()
        done = (await events_of(http, "/v1/rollouts", **body()))[-1]
        waited = (await http.post("/v1/rollouts", json=body(early_stop=False))).json()
    for told in (answer, done):
        receipt = told["receipt"]
        assert (receipt["num_stopped"], receipt["stopped_tokens"]) == (6, 120)
        assert 0 < receipt["saved_tokens"] <= 6 * 40
        assert receipt["waiting_seconds"] == receipt["seconds"] + receipt["saved_seconds"]
        assert {name: receipt[name] for name in TOKENS} == {name: told["usage"][name] for name in TOKENS}
        assert (receipt["saved_tokens_error"], receipt["num_checked"]) == (None, 0)
        assert 0 < receipt["bubble"] < 1
        assert receipt["queue_seconds"] == max(told["timing"]["started_s"])
    whole = waited["receipt"]
    assert (whole["num_stopped"], whole["saved_tokens"], whole["saved_seconds"]) == (0, 0, 0.0)
    assert (whole["num_checked"], whole["checked_tokens"]) == (6, 3 * (5 + 20))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [asdict(RolloutRow.model_validate(row).receipt) for row in rows[::2]] == [answer["receipt"], whole]
    assert len(read_trace(path).rollouts) == 3


@pytest.mark.parametrize(
    ("fields", "is_checked"),
    [
        ({"redundancy": 0}, True),
        ({"early_stop": False}, True),
        ({"selection": {"dual_end": {"patience": 9.0}}}, False),  # who was not stopped is short
    ],
)
async def test_only_lengths_that_nothing_could_have_cut_are_checked(engine, app, fields, is_checked):
    await assert_checked(engine, app, fields, is_checked)


async def assert_checked(engine, app, fields, is_checked):
    engine.lengths = {0: 40, 1: 10, 2: 25, 3: 20}
    async with http_of(app) as http:
        told = (await http.post("/v1/rollouts", json=body(**fields))).json()
    assert told["usage"]["num_surplus"] == 0
    assert (told["receipt"]["num_checked"] > 0) == is_checked


async def test_rounds_have_it_and_a_run_their_sum(engine: FakeEngine, tmp_path: Path) -> None:
    engine.step_s = 0.001
    database = tmp_path / "runs.sqlite"
    async with http_of(make_app(engine, database=database)) as http:
        assert (await make(http, response_speculation=2.0, resume=True))["receipt"] is None
        rounds = [await play(http, prompts=prompts(first, 6)) for first in (0, 6)] + [await play(http)]
        run = await look(http)
    short, long = rounds[0]["receipt"], rounds[2]["receipt"]
    assert 0 < short["postponed_tokens"] <= short["saved_tokens"]
    assert (long["num_stopped"], long["saved_seconds"], long["resumed_tokens"] > 0) == (0, 0.0, True)
    told = run["receipt"]
    for name in TOKENS:
        assert told[name] == sum(each["receipt"][name] for each in rounds)
    assert told["waiting_seconds"] == pytest.approx(sum(each["receipt"]["waiting_seconds"] for each in rounds[:2]))
    assert told["saved_seconds"] == pytest.approx(told["waiting_seconds"] - told["seconds"])
    async with http_of(make_app(FakeEngine(), database=database)) as http:
        assert (await look(http))["receipt"] == told

"""`--rollout-parallelism auto` over HTTP, with an engine whose candidates are preempted for what does not fit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.kernel.http.conftest import events_of, http_of, make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.support.waiting import eventually
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.parts.rounds.rules.planner import ParallelismPlanner
from vllm_rollout.parts.rounds.with_shaping.http.parallelism import Parallelism, Resized
from vllm_rollout.parts.rounds.with_shaping.rules.forecast import EngineSize
from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve

TOKENS_PER_DEVICE = 10
"""Candidates with more than that per device are preempted once."""


@dataclass
class Devices:
    """Implements `Resizable`."""

    engine: FakeEngine
    tensor_parallel_size: int = 1
    is_busy: bool = False
    startable: tuple[int, ...] = (1, 2, 4)
    resized: list[int] = field(default_factory=list)
    num_running: list[int] = field(default_factory=list)
    """Candidates in the engine, at each rebuild."""
    patience_s: list[float] = field(default_factory=list)
    gate: asyncio.Event | None = None
    """A rebuild takes until it is set."""

    def __post_init__(self) -> None:
        self.engine.preemptions = lambda num: int(num > TOKENS_PER_DEVICE * self.tensor_parallel_size)

    async def resize(self, size: int, patience_s: float) -> Resized:
        self.patience_s.append(patience_s)
        if self.is_busy:
            return Resized("busy", self.tensor_parallel_size, 0.0)
        self.num_running.append(self.engine.num_running)
        self.resized.append(size)
        if self.gate is not None:
            await self.gate.wait()
        if size not in self.startable:
            return Resized("failed", self.tensor_parallel_size, 2.0)
        self.tensor_parallel_size = size
        return Resized("rebuilt", size, 1.5)


@pytest.fixture
def devices(engine: FakeEngine) -> Devices:
    return Devices(engine)


@pytest.fixture
def parallelism(devices: Devices) -> Callable[[Metrics], Parallelism]:
    made: list[Parallelism] = []

    def make(metrics: Metrics) -> Parallelism:
        made.append(Parallelism(devices, ParallelismPlanner((1, 2, 4), devices.tensor_parallel_size), metrics))
        make.made = made[-1]  # type: ignore[attr-defined]
        return made[-1]

    return make


@pytest.fixture
async def http(engine: FakeEngine, parallelism: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with http_of(make_app(engine, make_parallelism=parallelism)) as client:
        await make(client, "a")
        yield client


async def make(http: httpx.AsyncClient, run: str) -> None:
    terms = {"group_size": 2, "prompts_per_round": 2, "prompt_speculation": 1.0, "response_speculation": 1.0}
    assert (await http.post("/v1/runs", json={"id": run, **terms})).status_code == 201


async def play(http: httpx.AsyncClient, num_tokens: int, run: str = "a", first: int = 0) -> dict[str, Any]:
    """A round whose candidates all have so many tokens."""
    prompts = [{"id": f"q{first + i}", "prompt": f"question {first + i}"} for i in range(2)]
    sampling = {"min_tokens": num_tokens, "max_tokens": num_tokens}
    response = await http.post(f"/v1/runs/{run}/rounds", json={"prompts": prompts, "sampling_params": sampling})
    assert response.status_code == 200, response.text
    return await look(http, run)


async def look(http: httpx.AsyncClient, run: str = "a") -> dict[str, Any]:
    return (await http.get(f"/v1/runs/{run}")).json()["parallelism"]


async def test_a_round_that_preempts_makes_the_engine_larger_before_the_next(http, devices):
    assert await look(http) == {
        "tensor_parallel_size": 1, "allowed_sizes": [1, 2, 4], "next_size": 1, "reason": "start",
        "preemptions_per_candidate": None, "level": 0.0, "is_rebuilding": False, "num_rebuilds": 0,
        "last_rebuild_s": None, "forecasts": None,
    }  # fmt: skip
    said = await play(http, 15)
    assert (said["tensor_parallel_size"], said["next_size"], said["reason"]) == (1, 2, "rise")
    assert said["preemptions_per_candidate"] == 1
    assert devices.resized == []
    said = await play(http, 15)
    assert (said["tensor_parallel_size"], said["next_size"], said["num_rebuilds"], said["last_rebuild_s"]) == (
        2, 2, 1, 1.5,
    )  # fmt: skip
    assert (devices.resized, devices.num_running) == ([2], [0])
    metrics = (await http.get("/metrics")).text
    assert "vllm_rollout:tensor_parallel_size 2.0" in metrics
    assert 'vllm_rollout:engine_rebuilds_total{outcome="rebuilt"} 1.0' in metrics
    assert "vllm_rollout:engine_rebuild_seconds_sum 1.5" in metrics


@pytest.mark.parametrize("patience_s", [60.0, 0.0])
async def test_a_round_of_another_run_is_waited_for_but_not_for_ever(http, devices, engine, monkeypatch, patience_s):
    monkeypatch.setattr("vllm_rollout.parts.rounds.with_shaping.http.parallelism.PATIENCE_S", patience_s)
    await make(http, "b")
    engine.step_s = 0.005
    slow = asyncio.create_task(play(http, 40, "b"))
    await eventually(lambda: engine.num_running, every_s=0.001)
    await play(http, 15)
    after = await play(http, 1, first=2)
    assert (after["tensor_parallel_size"], slow.done()) == ((2, True) if patience_s else (1, False))
    await slow
    assert (await play(http, 1, first=4))["tensor_parallel_size"] == 2
    assert devices.num_running == [0]


async def test_a_busy_engine_is_rebuilt_another_time(http: httpx.AsyncClient, devices: Devices) -> None:
    await play(http, 15)
    devices.is_busy = True
    for num_tokens in (15, 3):
        said = await play(http, num_tokens)
        assert (said["tensor_parallel_size"], said["next_size"], said["num_rebuilds"]) == (1, 2, 0)
    devices.is_busy = False
    await play(http, 3)
    assert devices.resized == [2]


async def test_a_size_at_which_no_engine_starts_is_not_tried_again(http: httpx.AsyncClient, devices: Devices) -> None:
    devices.startable = (1,)
    await play(http, 15)
    said = await play(http, 15)
    assert (said["tensor_parallel_size"], said["allowed_sizes"], said["num_rebuilds"]) == (1, [1], 1)
    await play(http, 15)
    assert devices.resized == [2]
    assert 'outcome="failed"} 1.0' in (await http.get("/metrics")).text


async def test_before_weights_are_sent_it_is_rebuilt_if_nothing_runs(http, devices, parallelism):
    await parallelism.made.before_weights()
    assert devices.patience_s == []
    await play(http, 15)
    await parallelism.made.before_weights()
    assert (devices.resized, devices.patience_s) == ([2], [0.0])
    await parallelism.made.before_weights()
    await play(http, 15)
    assert devices.resized == [2]


async def test_rounds_that_begin_during_a_rebuild_wait_and_one_is_enough(http, devices, engine):
    await make(http, "b")
    await play(http, 15)
    devices.gate = asyncio.Event()
    rounds = [asyncio.create_task(play(http, 3)), asyncio.create_task(play(http, 3, "b"))]
    await eventually(lambda: devices.resized, every_s=0.001)
    launched = engine.num_launched
    for _ in range(50):
        await asyncio.sleep(0)
    assert engine.num_launched == launched
    assert (await look(http))["is_rebuilding"]
    devices.gate.set()
    await asyncio.gather(*rounds)
    assert not (await look(http))["is_rebuilding"]
    assert devices.resized == [2]


async def test_a_rebuild_goes_on_when_whoever_waits_for_it_leaves(http: httpx.AsyncClient, devices: Devices) -> None:
    await play(http, 15)
    devices.gate = asyncio.Event()
    leaving = asyncio.create_task(play(http, 3))
    await eventually(lambda: devices.resized, every_s=0.001)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    devices.gate.set()
    assert (await play(http, 3, first=2))["tensor_parallel_size"] == 2
    assert devices.resized == [2]


@pytest.fixture
def lines() -> list[str]:
    """Log lines for the operator of the server."""
    return []


@pytest.fixture
async def profiled(engine: FakeEngine, devices: Devices, lines: list[str]) -> AsyncIterator[httpx.AsyncClient]:
    """A profile says that two devices are quicker than one and than four, and that one has little room."""
    sizes = {
        size: EngineSize(CostModel(((0.0, PTLCurve((1.0,), (step_s,))),), 1e-5, max_num_seqs=64), kv_tokens)
        for size, step_s, kv_tokens in ((1, 0.010, 800), (2, 0.006, 10**6), (4, 0.007, 10**6))
    }

    def make_profiled(metrics: Metrics) -> Parallelism:
        return Parallelism(devices, ParallelismPlanner((1, 2, 4), 1), metrics, sizes, lines.append)

    async with http_of(make_app(engine, make_parallelism=make_profiled)) as client:
        yield client


async def test_with_a_profile_the_first_run_begins_at_the_size_that_is_best_for_it(profiled, devices, lines):
    await make(profiled, "a")
    said = await look(profiled)
    assert (said["tensor_parallel_size"], said["next_size"], said["reason"]) == (1, 2, "profile")
    forecasts = said["forecasts"]
    assert min(forecasts, key=lambda size: forecasts[size]["seconds"]) == "2"
    assert forecasts["1"]["num_preemptions"] > 0 == forecasts["2"]["num_preemptions"]
    assert len(lines) == 1
    assert "run 'a' begins at tensor-parallel size 2. The profile expects of a round of 4 candidates" in lines[0]
    await make(profiled, "b")
    assert len(lines) == 1
    said = await play(profiled, 3, "b")
    assert (said["tensor_parallel_size"], devices.resized) == (2, [2])


async def test_a_round_says_that_the_engine_was_rebuilt_before_it_and_a_stream_begins_with_it(http, devices):
    def body(first: int, num_tokens: int) -> dict[str, Any]:
        prompts = [{"id": f"p{first + i}", "prompt": "hello"} for i in range(2)]
        return {"prompts": prompts, "sampling_params": {"min_tokens": num_tokens, "max_tokens": num_tokens}}

    rounds = "/v1/runs/a/rounds"
    assert (await http.post(rounds, json=body(0, 15))).json()["rebuilt"] is None
    rebuilt = {"wanted_size": 2, "size_before": 1, "tensor_parallel_size": 2, "reason": "rise", "seconds": 1.5}
    events = await events_of(http, rounds, **body(2, 1))
    assert (events[0]["type"], events[0]["rebuilt"]) == ("round", rebuilt)
    assert (events[-1]["type"], events[-1]["rebuilt"]) == ("done", rebuilt)
    assert (await http.post(rounds, json=body(4, 1))).json()["rebuilt"] is None


async def test_without_the_flag_a_run_says_nothing_of_it(engine: FakeEngine) -> None:
    async with http_of(make_app(engine)) as http:
        await make(http, "a")
        assert await look(http) is None

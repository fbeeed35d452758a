"""Known lengths of answers in the launch window: whose group starts first."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import pytest

from tests.kernel.http.test_launch import WatchedEngine, request, service_of
from tests.parts.shaping.fakes import FakeShaping
from vllm_rollout.kernel.http import rollout as rollouts
from vllm_rollout.kernel.http.answers import Timing
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.rules.prompt_key import history_key
from vllm_rollout.parts.shaping.rules.history import ObservedLength


async def engine_that_knows() -> WatchedEngine:
    """An engine with places for two groups, and known lengths of six prompts. The last prompt is the longest."""
    engine = WatchedEngine(max_num_seqs=8, num_launch_places=16)
    for i in range(6):
        lengths = [ObservedLength(100 * (i + 1) + j, False) for j in range(4)]
        await engine.part(FakeShaping).observe_lengths(history_key(f"p{i}", ()), lengths)
    return engine


@pytest.mark.parametrize("fields", [{}, {"redundancy": "auto"}])
async def test_prompts_whose_answers_were_long_start_first_unless_the_request_says_no(fields):
    async def started(**more: Any) -> tuple[list[str], Timing]:
        engine = await engine_that_knows()
        service = service_of(engine)
        rollout = await service.prepare(request("p", 6, **fields, **more))
        async with aclosing(service.events(rollout)) as events:
            (timing,) = [event.timing async for event in events if event.type == "done"]
        return engine.started, timing

    order, timing = await started(order="prompts")
    assert order == ["p0", "p1", "p2", "p3", "p4", "p5"]
    assert timing.started_s == sorted(timing.started_s)
    order, timing = await started()
    assert order == ["p5", "p4", "p3", "p2", "p1", "p0"]
    assert timing.started_s == sorted(timing.started_s, reverse=True)
    assert timing.started_s[-1] < timing.started_s[0] <= timing.latency_s


async def test_where_all_can_run_at_once_nobody_asks_how_long_prompts_are(monkeypatch):
    engine = WatchedEngine(max_num_seqs=24, num_launch_places=48)
    monkeypatch.setattr(FakeShaping, "length_history", None)
    await service_of(engine).prepare(request("p", 6))
    with pytest.raises(TypeError):
        await service_of(engine).prepare(request("p", 7))
    await service_of(engine).prepare(request("p", 7, order="prompts"))


async def test_the_most_candidates_of_a_budget_are_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(rollouts, "MAX_CANDIDATES", 100)
    with pytest.raises(RequestError, match="13 of up to 8"):
        await service_of(WatchedEngine()).prepare(request("p", 13, redundancy="auto"))

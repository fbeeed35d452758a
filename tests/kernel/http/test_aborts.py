"""Rollouts that a client aborts by name: nothing of them starts any more, whatever runs when the abort comes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.kernel.http.fake_engine import FakeEngine
from tests.support.waiting import eventually
from vllm_rollout.kernel.call_table import ABORT_REQUESTS
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.kernel.rules.types import ABORTED

ENDLESS = {"min_tokens": 4000, "max_tokens": 4000}


@pytest.fixture
def service(engine: FakeEngine) -> RolloutService:
    engine.num_launch_places = 8
    engine.step_s = 0.001
    return RolloutService(engine, Metrics(CollectorRegistry()))


async def started(service: RolloutService, num_prompts: int = 40) -> tuple[Any, asyncio.Task[Any]]:
    """A rollout of many groups, of which two have places."""
    body = {"prompts": [{"prompt": "a"}] * num_prompts, "group_size": 4, "sampling_params": ENDLESS}
    rollout = await service.prepare(RolloutRequest.model_validate(body))
    return rollout, asyncio.create_task(ends_of(service, rollout))


async def ends_of(service: RolloutService, rollout: Any) -> list[Any]:
    return [event async for event in service.events(rollout)]


def check_aborted(events: list[Any], num_prompts: int = 40) -> None:
    done = events[-1]
    groups = [event for event in events if event.type == "group"]
    assert [group.status for group in groups] == ["incomplete"] * num_prompts
    assert (done.usage.num_failed, done.usage.num_candidates) == (4 * num_prompts, 4 * num_prompts)
    assert done.usage.generated_tokens == done.usage.wasted_tokens
    assert any(ABORTED in warning for warning in done.warnings)


async def test_where_another_process_hears_of_the_abort_its_candidates_say_so(
    engine: FakeEngine, service: RolloutService
) -> None:
    rollout, running = await started(service)
    await eventually(lambda: engine.num_launched == 8)
    assert len((await engine.call_all(ABORT_REQUESTS, [rollout.id]))[0]) == 8
    check_aborted(await running)
    assert engine.num_launched <= 16, "groups that began before this process heard of it"
    assert (engine.num_running, service._launcher.window.num_taken) == (0, 0)


async def test_a_rollout_that_only_waits_for_places_does_not_start_later(
    engine: FakeEngine, service: RolloutService
) -> None:
    other, first = await started(service, 2)
    await eventually(lambda: engine.num_launched == 8)
    waiting, running = await started(service, 10)
    await eventually(lambda: service._launcher.window.num_waiting > 0)
    service.aborts.named({waiting.id})
    await asyncio.sleep(0.5)  # whatever is repeated for a while is over by then
    service.aborts.named({other.id})
    check_aborted(await first, 2)
    check_aborted(await running, 10)
    assert engine.num_launched == 8, "of the other rollout"


async def test_when_all_is_aborted_no_rollout_starts_anything_more(engine: FakeEngine, service: RolloutService) -> None:
    _, first = await started(service, 10)
    _, second = await started(service, 10)
    await eventually(lambda: engine.num_launched == 8)
    service.aborts.all()
    check_aborted(await first, 10)
    check_aborted(await second, 10)
    assert engine.num_launched <= 16, "groups that had a place by then"


async def test_others_go_on(engine: FakeEngine, service: RolloutService) -> None:
    body = {"prompts": [{"prompt": "a"}] * 8, "group_size": 4}
    other = await service.prepare(RolloutRequest.model_validate(body))
    aborted, running = await started(service)
    its = asyncio.create_task(ends_of(service, other))
    await eventually(lambda: engine.num_launched >= 8)
    service.aborts.named({aborted.id})
    check_aborted(await running)
    assert {event.status for event in await its if event.type == "group"} == {"complete"}

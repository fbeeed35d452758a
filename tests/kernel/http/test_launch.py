"""The launch window: how much is in the engine, who is next, what a client that goes leaves, and groups read as one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.kernel.http.conftest import DEADLINE_S
from tests.kernel.http.fake_engine import FakeEngine
from tests.support.waiting import eventually
from vllm_rollout.kernel.http import rollout as rollouts
from vllm_rollout.kernel.http.engine import GroupOrder, RequestError
from vllm_rollout.kernel.http.fan_in import FanIn
from vllm_rollout.kernel.http.launch import Launcher
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.kernel.rules.launch import Asker

ENDLESS = {"min_tokens": 4000}


class WatchedEngine(FakeEngine):
    """Notes which groups start, and how many candidates it has at most."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.started: list[str] = []
        self.orders: dict[str, GroupOrder] = {}
        self.most_running = 0

    async def run_group(self, order: GroupOrder) -> Any:
        self.started.append(order.prompt.id)
        self.orders[order.prompt.id] = order
        self.most_running = max(self.most_running, self.num_running + order.plan.num_candidates)
        async with aclosing(super().run_group(order)) as happenings:
            async for happening in happenings:
                yield happening


def request(name: str, num_prompts: int, **fields: Any) -> RolloutRequest:
    prompts = [{"id": f"{name}{i}", "prompt": f"prompt {i}"} for i in range(num_prompts)]
    return RolloutRequest.model_validate({"prompts": prompts, "group_size": 4, **fields})


def service_of(engine: FakeEngine) -> RolloutService:
    return RolloutService(engine, Metrics(CollectorRegistry()))


async def run(service: RolloutService, body: RolloutRequest) -> list[str]:
    rollout = await service.prepare(body)
    async with aclosing(service.events(rollout)) as events:
        return [event.type async for event in events]


async def test_no_more_candidates_start_than_there_are_places_and_prompts_keep_their_order():
    engine = WatchedEngine(num_launch_places=16)
    events = await run(service_of(engine), request("p", 40))
    assert events.count("group") == 40
    assert engine.most_running <= 16
    assert engine.started == [f"p{i}" for i in range(40)]


async def test_of_those_that_wait_rollouts_with_a_lower_number_start_first():
    engine = WatchedEngine(num_launch_places=8)
    service = service_of(engine)
    busy = asyncio.create_task(run(service, request("busy", 2, sampling_params=ENDLESS)))
    await eventually(lambda: len(engine.started) == 2)
    waiting = []
    for name, priority in (("train", 0), ("later", 5), ("eval", -1), ("also-train", 0), ("also-eval", -1)):
        waiting.append(asyncio.create_task(run(service, request(name, 1, priority=priority))))
        await eventually(lambda: service._launcher.window.num_waiting == len(waiting))
    busy.cancel()
    await asyncio.wait([busy, *waiting])
    assert engine.started[2:] == ["eval0", "also-eval0", "train0", "also-train0", "later0"]
    assert engine.orders["eval0"].priority == -1


async def test_clients_that_go_while_they_wait_leave_no_place_taken():
    engine = WatchedEngine(num_launch_places=8)
    service = service_of(engine)
    runs = [asyncio.create_task(run(service, request(f"{i}-", 3, sampling_params=ENDLESS))) for i in range(6)]
    await eventually(lambda: len(engine.started) == 2)
    for task in runs:
        task.cancel()
    await asyncio.wait(runs)
    assert engine.num_running == 0
    assert (await asyncio.wait_for(run(service, request("last", 3)), DEADLINE_S)).count("group") == 3


async def test_a_reader_that_does_not_read_keeps_no_place_from_others():
    engine = WatchedEngine(num_launch_places=8)
    service = service_of(engine)
    rollout = await service.prepare(request("stalled", 50, stream=True, stream_tokens=1, sampling_params=ENDLESS))
    async with aclosing(service.events(rollout)) as events:
        await anext(events)
        await eventually(lambda: engine.is_idle)
        assert (await asyncio.wait_for(run(service, request("other", 3)), DEADLINE_S)).count("group") == 3
        assert sum(name.startswith("stalled") for name in engine.started) <= 2 * 8 / 4


async def test_more_candidates_than_memory_is_meant_for_are_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(rollouts, "MAX_CANDIDATES", 100)
    engine = WatchedEngine()
    service = service_of(engine)
    with pytest.raises(RequestError, match=r"13 of up to 8 .* 104 .* at most 100 .* fewer prompts") as raised:
        await service.prepare(request("p", 13, redundancy=4))
    assert (raised.value.status, raised.value.param) == (400, "prompts")
    await service.prepare(request("p", 12, redundancy=4))
    assert engine.started == []


async def test_a_group_that_starts_again_keeps_the_places_that_came_meanwhile_for_others_of_its_candidates():
    launcher = Launcher(4)
    places, others = await launcher.take(2), await launcher.take(2)
    more = asyncio.create_task(places.take_more(1))
    await asyncio.sleep(0)
    again = asyncio.create_task(places.take_again(2))
    await more
    others.release_all()
    await again
    assert (places.num_held, launcher.window.num_taken) == (3, 3)
    places.release_all()
    assert launcher.window.num_taken == 0


@pytest.mark.parametrize("name", ["take_more", "take_again"])
async def test_a_group_that_has_begun_does_not_wait_for_later_ones_of_its_source(name):
    launcher, feed = Launcher(4), Asker(source="feed")
    first, second = await launcher.take(2, feed), await launcher.take(2, feed)
    later = [asyncio.create_task(launcher.take(2, feed)) for _ in range(3)]
    await asyncio.sleep(0)
    again = asyncio.create_task(getattr(first, name)(2))
    await asyncio.sleep(0)
    second.release_all()
    (await later[0]).release_all()
    await asyncio.wait_for(again, DEADLINE_S)
    assert not later[2].done()
    for task in later:
        task.cancel()


@pytest.mark.parametrize("name", ["take_more", "take_again"])
async def test_what_a_group_takes_later_it_takes_by_the_priority_of_its_rollout(name):
    launcher = Launcher(8)
    first = await launcher.take(4, Asker(-1))
    second = await launcher.take(4)
    third = asyncio.create_task(launcher.take(8))
    await asyncio.sleep(0)
    again = asyncio.create_task(getattr(first, name)(4))
    await asyncio.sleep(0)
    second.release_all()
    await asyncio.wait_for(again, DEADLINE_S)
    assert not third.done()
    first.release_all()
    assert (await asyncio.wait_for(third, DEADLINE_S)).num_held == 8


async def test_a_turn_that_is_cancelled_as_it_comes_goes_to_the_next():
    launcher = Launcher(4)
    first = await launcher.take(4)
    second, third = (asyncio.create_task(launcher.take(4)) for _ in range(2))
    await asyncio.sleep(0)
    first.release_all()
    second.cancel()
    places = await asyncio.wait_for(third, DEADLINE_S)
    assert launcher.window.num_taken == 4
    places.release(1)
    places.release_all()
    places.release_all()
    assert (launcher.window.num_taken, launcher.window.num_waiting) == (0, 0)


@pytest.mark.parametrize("num_turns", range(1, 7))
async def test_a_round_that_is_left_as_its_turn_comes_keeps_no_place(num_turns: int):
    launcher, stop = Launcher(4), asyncio.Event()
    taking = asyncio.create_task(launcher.take_unless(stop.wait(), 4))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    taking.cancel()
    for places in await asyncio.gather(taking, return_exceptions=True):
        if not isinstance(places, BaseException):
            places.release_all()
    assert (launcher.window.num_taken, launcher.window.num_waiting) == (0, 0)


async def test_a_small_rollout_does_not_wait_behind_a_huge_one():
    engine = WatchedEngine(num_launch_places=16)
    service = service_of(engine)
    huge = asyncio.create_task(run(service, request("huge", 200)))
    await eventually(lambda: len(engine.started) >= 10)
    started = len(engine.started)
    await asyncio.wait_for(run(service, request("small", 2)), DEADLINE_S)
    assert engine.started.index("small1") - started <= 6
    assert not huge.done()
    await asyncio.wait_for(huge, DEADLINE_S)


class Source:
    """Says its name and a number, so often, and notes that it has been closed."""

    def __init__(self, name: str, num: int, error: Exception | None = None) -> None:
        self.name = name
        self.num = num
        self.error = error
        self.num_said = 0
        self.is_closed = False

    async def items(self) -> AsyncGenerator[str, None]:
        try:
            while self.num_said < self.num:
                self.num_said += 1
                yield f"{self.name}{self.num_said}"
            if self.error is not None:
                raise self.error
        finally:
            await asyncio.sleep(0)
            self.is_closed = True


async def turns(num: int = 20) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


async def test_all_that_is_said_is_read_each_source_in_its_order() -> None:
    fan_in: FanIn[str] = FanIn(2)
    for name, num in (("a", 3), ("b", 0), ("c", 4)):
        fan_in.add(Source(name, num).items())
    read = [item async for item in fan_in]
    assert Counter(read) == Counter(["a1", "a2", "a3", "c1", "c2", "c3", "c4"])
    assert [item for item in read if item < "b"] == ["a1", "a2", "a3"]
    assert [item for item in read if item > "b"] == ["c1", "c2", "c3", "c4"]


async def test_the_first_error_ends_the_reading_after_what_was_said_before_it() -> None:
    fan_in: FanIn[str] = FanIn(1)
    endless = Source("b", 10**9)
    fan_in.add(Source("a", 2, KeyError("lost")).items())
    fan_in.add(endless.items())
    read: list[str] = []

    async def read_all() -> None:
        async for item in fan_in:
            read.append(item)

    with pytest.raises(KeyError, match="lost"):
        await read_all()
    assert [item for item in read if item < "b"] == ["a1", "a2"]
    await fan_in.close()
    assert endless.is_closed


async def test_a_source_waits_when_nobody_reads_and_lets_go_of_what_it_holds() -> None:
    fan_in: FanIn[str] = FanIn(3)
    source = Source("a", 9)
    let_go: list[int] = []
    fan_in.add(source.items(), lambda: let_go.append(source.num_said))
    await turns()
    assert source.num_said == 4  # three have a place, and it waits with the next one
    assert let_go == [4]
    await fan_in.close()
    assert (source.num_said, source.is_closed) == (4, True)
    assert let_go == [4, 4]


async def test_close_waits_until_sources_have_cleaned_up_also_those_that_wait_themselves() -> None:
    fan_in: FanIn[str] = FanIn(1)
    closed = []

    async def stuck() -> AsyncGenerator[str, None]:
        try:
            await asyncio.Event().wait()
            yield "never"
        finally:
            await turns()
            closed.append("stuck")

    tasks = [fan_in.add(stuck()), fan_in.add(Source("a", 5).items())]
    await turns()
    await fan_in.close()
    assert closed == ["stuck"]
    assert all(task.done() for task in tasks)


async def test_what_no_source_says_is_read_and_not_waited_for() -> None:
    fan_in: FanIn[str] = FanIn(4)
    await fan_in.put("news")
    fan_in.add(Source("a", 1).items())
    assert [item async for item in fan_in] == ["news", "a1"]
    await fan_in.put("too late")
    assert [item async for item in fan_in] == []


async def test_sources_come_to_their_end_when_what_they_say_is_dropped() -> None:
    fan_in: FanIn[str] = FanIn(1)
    source = Source("a", 30)
    task = fan_in.add(source.items())
    await turns()
    assert not task.done()
    dropping = asyncio.create_task(fan_in.drop())
    await asyncio.wait([task])
    dropping.cancel()
    assert (source.num_said, source.is_closed) == (30, True)

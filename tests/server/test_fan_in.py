"""Many async generators read as one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator

import pytest

from vllm_rollout.server.fan_in import FanIn

pytestmark = pytest.mark.anyio


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


async def test_a_source_may_bring_another_one_until_its_own_end() -> None:
    fan_in: FanIn[str] = FanIn(1)

    async def first() -> AsyncGenerator[str, None]:
        yield "first"
        fan_in.add(Source("late", 2).items())

    fan_in.add(first())
    assert [item async for item in fan_in] == ["first", "late1", "late2"]


async def test_without_a_source_there_is_nothing_to_read() -> None:
    assert [item async for item in FanIn[str](1)] == []


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


async def test_a_source_waits_when_nobody_reads() -> None:
    fan_in: FanIn[str] = FanIn(3)
    source = Source("a", 9)
    fan_in.add(source.items())
    assert not fan_in.is_full
    await turns()
    assert fan_in.is_full
    assert source.num_said == 4  # three have a place, and it waits with the next one
    await fan_in.close()
    assert (source.num_said, source.is_closed) == (4, True)


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


async def test_a_reader_that_is_cancelled_leaves_what_runs_to_close() -> None:
    fan_in: FanIn[str] = FanIn(1)
    task = fan_in.add(Source("a", 0).items())
    waiting = fan_in.add(_forever())

    async def read() -> None:
        try:
            async for _ in fan_in:
                pass
        finally:
            await fan_in.close()

    reading = asyncio.create_task(read())
    await turns()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert (task.done(), waiting.cancelled()) == (True, True)


async def _forever() -> AsyncGenerator[str, None]:
    await asyncio.Event().wait()
    yield "never"


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

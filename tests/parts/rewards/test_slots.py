"""Order in which waiting trajectories are graded."""

from __future__ import annotations

import asyncio
import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.parts.rewards.grading.slots import GraderBusy, Slots, Urgency

pytestmark = pytest.mark.anyio


async def test_a_reward_that_hangs_leaves_places_to_the_others():
    slots = Slots(2, 10)
    served: list[str] = []
    ends = {name: asyncio.Event() for name in ("hang0", "hang1", "hang2", "hang3", "quick0", "quick1")}

    async def ask(name: str) -> None:
        async with slots.one(name[:-1], Urgency(1.0 if name[:-1] == "hang" else 0.0)):
            served.append(name)
            await ends[name].wait()

    tasks = [asyncio.create_task(ask(name)) for name in ends]
    for name in ("hang0", "quick0", "quick1", "hang1", "hang2", "hang3"):
        for _ in range(5):
            await asyncio.sleep(0)
        ends[name].set()
    await asyncio.gather(*tasks)
    assert served == ["hang0", "hang1", "quick0", "quick1", "hang2", "hang3"]


async def test_who_leaves_while_it_waits_takes_no_place_and_too_many_are_refused():
    slots = Slots(1, 1)
    async with slots.one("a", Urgency()):
        waiting = asyncio.create_task(slots.one("a", Urgency()).__aenter__())
        await asyncio.sleep(0)
        with pytest.raises(GraderBusy, match="1 trajectories wait for the reward a"):
            await slots.one("a", Urgency()).__aenter__()
        other = asyncio.create_task(slots.one("b", Urgency()).__aenter__())  # of another reward there may be as many
        await asyncio.sleep(0)
        assert slots.num_waiting == {"a": 1, "b": 1}
        for each in (waiting, other):
            each.cancel()
        await asyncio.gather(waiting, other, return_exceptions=True)
    async with slots.one("b", Urgency()):
        pass


async def test_work_grows_with_those_who_wait_and_not_with_their_square(monkeypatch):
    """A group of 4,096 candidates, each of whose grades makes the rest more urgent."""
    num, num_pushes = 4096, 0
    push = heapq.heappush

    def counted(heap, item):
        nonlocal num_pushes
        num_pushes += 1
        push(heap, item)

    monkeypatch.setattr(heapq, "heappush", counted)
    slots, urgency, graded = Slots(1, num), Urgency(), []

    async def grade(index):
        async with slots.one("code", urgency):
            await asyncio.sleep(0)
            graded.append(index)
            urgency.hasten(len(graded) / num)

    await asyncio.gather(*(grade(index) for index in range(num)))
    assert graded == list(range(num))
    assert num_pushes <= 3 * num


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.integers(0, 3), st.sampled_from("ab")),
            st.tuples(st.just("hasten"), st.integers(0, 3), st.floats(0, 1)),
            st.tuples(st.just("leave"), st.integers(0, 40), st.none()),
            st.tuples(st.just("end"), st.integers(0, 40), st.none()),
        ),
        max_size=60,
    )
)
def test_whoever_is_most_urgent_and_came_first_comes_next_whatever_happens(acts):
    """Against a list that is searched each time."""

    async def run():
        slots, urgencies = Slots(2, 1000), [Urgency() for _ in range(4)]
        order, expected, waiting, running, tasks, leave = [], [], [], [], {}, {}

        async def one(number, reward, urgency):
            async with slots.one(reward, urgency):
                order.append(number)
                await leave[number].wait()

        def next_ones():
            while waiting and len(running) < 2:
                rewards = [reward for _, reward in running]
                number, reward, urgency = min(
                    waiting, key=lambda each: (rewards.count(each[1]), -each[2].level, each[0])
                )
                waiting.remove((number, reward, urgency))
                running.append((number, reward))
                expected.append(number)

        for position, (act, which, what) in enumerate(acts):
            if act == "ask":
                leave[position] = asyncio.Event()
                waiting.append((position, what, urgencies[which]))
                tasks[position] = asyncio.create_task(one(position, what, urgencies[which]))
            elif act == "hasten":
                urgencies[which].hasten(what)
            elif act == "leave" and waiting:
                number = waiting.pop(which % len(waiting))[0]
                tasks[number].cancel()
            elif act == "end" and running:
                number = running.pop(which % len(running))[0]
                leave[number].set()
            next_ones()
            for _ in range(4):
                await asyncio.sleep(0)
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert order == expected

    asyncio.run(run())

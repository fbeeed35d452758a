"""Who is graded next."""

from __future__ import annotations

import asyncio

import pytest

from vllm_rollout.rewards.slots import GraderBusy, Slots, Urgency

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

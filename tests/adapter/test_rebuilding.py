"""Whoever asks an engine that is being rebuilt waits, and is answered by the next one."""

from __future__ import annotations

import asyncio

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_rollout.adapter.api.client.door import Door
from vllm_rollout.adapter.api.engine.rebuilding import ClosedEngine


class Core:
    """An engine core client that answers with its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.core_engines = [name]
        self.num_asked = 0

    async def ask(self, what: str) -> str:
        self.num_asked += 1
        return f"{self.name} {what}"

    def dp_engines_running(self) -> bool:
        return False


async def turns(num: int = 5) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


def test_what_a_closed_engine_is_asked_the_next_one_answers() -> None:
    async def main() -> None:
        old, new = Core("old"), Core("new")
        closed = ClosedEngine(old)
        asked = [asyncio.create_task(closed.ask(what)) for what in ("a", "b")]
        await turns()
        assert not any(task.done() for task in asked)
        assert not closed.resources.engine_dead
        assert closed.core_engines == ["old"]
        assert closed.dp_engines_running() is False
        closed.give_way(new)
        assert await asyncio.gather(*asked) == ["new a", "new b"]
        assert await closed.ask("c") == "new c"
        assert old.num_asked == 0

    asyncio.run(main())


def test_who_leaves_while_waiting_takes_nobody_with_him() -> None:
    async def main() -> None:
        closed = ClosedEngine(Core("old"))
        gone, stays = (asyncio.create_task(closed.ask("x")) for _ in range(2))
        await turns()
        gone.cancel()
        await turns()
        closed.give_way(Core("new"))
        assert await stays == "new x"
        assert gone.cancelled()

    asyncio.run(main())


def test_when_no_engine_comes_back_who_waits_is_told() -> None:
    async def main() -> None:
        closed = ClosedEngine(Core("old"))
        asked = asyncio.create_task(closed.ask("x"))
        await turns()
        closed.die()
        with pytest.raises(EngineDeadError):
            await asked
        assert closed.resources.engine_dead

    asyncio.run(main())


def test_a_server_that_ends_says_so_to_the_engine_that_is_being_built() -> None:
    async def main() -> None:
        closed = ClosedEngine(Core("old"))
        assert not closed.is_stopping
        closed.shutdown(timeout=1.0)
        assert closed.is_stopping

    asyncio.run(main())


def test_a_shut_door_lets_nobody_in_and_all_of_them_when_it_opens() -> None:
    async def main() -> None:
        door, inside = Door(), []

        async def enter(name: str) -> None:
            async with door.passing():
                inside.append((name, door.num_inside))
                await asyncio.sleep(0)

        await enter("first")
        door.shut()
        waiting = [asyncio.create_task(enter(name)) for name in "ab"]
        await turns()
        assert (inside, door.num_inside) == ([("first", 1)], 0)
        door.open()
        await asyncio.gather(*waiting)
        assert inside == [("first", 1), ("a", 1), ("b", 2)]
        assert door.num_inside == 0

    asyncio.run(main())


def test_who_fails_or_leaves_inside_the_door_is_not_counted_any_more() -> None:
    async def main() -> None:
        door = Door()
        with pytest.raises(ValueError, match="bad prompt"):
            async with door.passing():
                raise ValueError("bad prompt")
        door.shut()

        async def enter() -> None:
            async with door.passing():
                pass

        gone = asyncio.create_task(enter())
        await turns()
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert door.num_inside == 0

    asyncio.run(main())

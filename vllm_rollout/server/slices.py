"""Work in the event loop: long work in slices, and what is given up when something else comes first.

Invariant: whoever works through a list lets others have a turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")

SLICE_S = 0.005
"""Work between two turns of the others."""


class Slices:
    """`await slices.turn()` between two items; it costs a look at the clock where no turn is due."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    async def turn(self) -> None:
        if time.monotonic() - self._began_s >= SLICE_S:
            await asyncio.sleep(0)
            self._began_s = time.monotonic()


async def each(items: Iterable[Item], make: Callable[[Item], Made]) -> list[Made]:
    """What `make` makes of each of many items."""
    made, slices = [], Slices()
    for item in items:
        made.append(make(item))
        await slices.turn()
    return made


async def chained(first: Item, rest: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
    """What was asked for already, then the rest."""
    async with aclosing(rest):
        yield first
        async for item in rest:
            yield item


async def unless(work: Awaitable[Made], *ends: Awaitable[object]) -> Made | None:
    """Await `work`; when one of `ends` comes first, cancel it and return None."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(each) for each in (work, *ends)]
    working: asyncio.Future[Made] = tasks[0]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""Helpers for work in the event loop: long work in slices, and work that is given up when something else comes
first.

Invariant: work on a long list lets other tasks have a turn.
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
"""Seconds of work between two turns of other tasks."""


class Slices:
    """Await `slices.turn()` between two items. As long as no turn is due, it only reads the clock."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    async def turn(self) -> None:
        if time.monotonic() - self._began_s >= SLICE_S:
            await asyncio.sleep(0)
            self._began_s = time.monotonic()


async def each(items: Iterable[Item], make: Callable[[Item], Made]) -> list[Made]:
    """The results of `make` for each of many items, with turns for other tasks in between."""
    made, slices = [], Slices()
    for item in items:
        made.append(make(item))
        await slices.turn()
    return made


async def chained(first: Item, rest: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
    """An item that was fetched before, then the rest."""
    async with aclosing(rest):
        yield first
        async for item in rest:
            yield item


async def unless(work: Awaitable[Made], *ends: Awaitable[object]) -> Made | None:
    """Await `work`. If one of `ends` is done first, cancel it and return None."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(each) for each in (work, *ends)]
    working: asyncio.Future[Made] = tasks[0]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

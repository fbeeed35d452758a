"""Many async generators, read as one.

Invariant: items of a source come in its order, and before its end. The first source that fails ends the reading. After
`close` no source runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

from vllm_rollout.background import begin

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class _Over:
    """A source has ended."""

    error: Exception | None


class FanIn(Generic[Item]):
    """Reads several sources, each in a task of its own, as far as there is room for their items."""

    def __init__(self, num_places: int) -> None:
        """`num_places`: most items that wait for the reader. A source with another item waits."""
        self._queue: asyncio.Queue[Item | _Over] = asyncio.Queue(num_places)
        self._running: set[asyncio.Task[None]] = set()
        self._num_unread = 0
        """Number of sources whose end the reader has not taken."""

    def add(self, source: AsyncGenerator[Item, None], let_go: Callable[[], None] = lambda: None) -> asyncio.Task[None]:
        """Read one more source, even after others have begun. Returns the task that reads it, which may be
        cancelled. `let_go`: called when an item has to wait for the reader, and at the end of the source."""
        self._num_unread += 1
        return begin(self._run(source, let_go), self._running)

    async def put(self, item: Item) -> None:
        """Add an item that belongs to no source. Reading may end before it is read."""
        await self._queue.put(item)

    def __aiter__(self) -> FanIn[Item]:
        return self

    async def __anext__(self) -> Item:
        """The next item of any source, until all sources have ended. Raises: what a source raises."""
        while self._num_unread:
            item = await self._queue.get()
            if not isinstance(item, _Over):
                return item
            self._num_unread -= 1
            if item.error is not None:
                raise item.error
        raise StopAsyncIteration

    async def drop(self) -> None:
        """Drop all items until cancelled, in place of a reader that has left, so that sources come to their end."""
        while True:
            await self._queue.get()

    async def close(self) -> None:
        """Cancel the sources that run, and wait for them."""
        running = tuple(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, source: AsyncGenerator[Item, None], let_go: Callable[[], None]) -> None:
        error = None
        try:
            async with aclosing(source):
                async for item in source:
                    if self._queue.full():
                        let_go()
                    await self._queue.put(item)
        except Exception as raised:  # handed to the reader, who raises it
            error = raised
        finally:
            let_go()
        await self._queue.put(_Over(error))

"""Many async generators read as one.

Invariant: what one source says comes in its order, and before its end; the first source that fails ends the reading,
and after `close` none of them runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
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
    """Its sources run by themselves, each in a task of its own, as far as there is room for what they say."""

    def __init__(self, num_places: int) -> None:
        """`num_places`: for items that the reader has not taken. A source that has another one waits."""
        self._queue: asyncio.Queue[Item | _Over] = asyncio.Queue(num_places)
        self._running: set[asyncio.Task[None]] = set()
        self._num_unread = 0
        """Sources whose end the reader has not seen."""

    @property
    def is_full(self) -> bool:
        """The next item waits for the reader."""
        return self._queue.full()

    def add(self, source: AsyncGenerator[Item, None]) -> asyncio.Task[None]:
        """Read this source, too, also when others have begun; returns the task that does, which may be cancelled."""
        self._num_unread += 1
        return begin(self._run(source), self._running)

    async def put(self, item: Item) -> None:
        """An item of no source, for which nobody waits at the end."""
        await self._queue.put(item)

    def __aiter__(self) -> FanIn[Item]:
        return self

    async def __anext__(self) -> Item:
        """What a source says next, until all of them have ended. Raises: what a source raises."""
        while self._num_unread:
            item = await self._queue.get()
            if not isinstance(item, _Over):
                return item
            self._num_unread -= 1
            if item.error is not None:
                raise item.error
        raise StopAsyncIteration

    async def drop(self) -> None:
        """Until it is cancelled, stand for a reader who has left: sources come to their end, and nobody hears them."""
        while True:
            await self._queue.get()

    async def close(self) -> None:
        """Cancel the sources that run, and wait for them."""
        running = tuple(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, source: AsyncGenerator[Item, None]) -> None:
        error = None
        try:
            async with aclosing(source):
                async for item in source:
                    await self._queue.put(item)
        except Exception as raised:  # handed to the reader, who raises it
            error = raised
        await self._queue.put(_Over(error))

"""A gate for requests to an engine or a group. It is shut while the engine is rebuilt or the group moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Door:
    """Lets requests in. Invariant: a request that comes while the gate is shut waits, and enters once."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._empty = asyncio.Event()
        self._open.set()
        self._empty.set()
        self.num_inside = 0
        """Requests that are entering and not yet among vLLM's unfinished requests."""

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def opened(self) -> None:
        """Wait until the gate is open."""
        while not self.is_open:
            await self._open.wait()

    async def left_by_all(self) -> None:
        """Wait until no request is entering."""
        await self._empty.wait()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        await self.opened()
        self.num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.num_inside -= 1
            if not self.num_inside:
                self._empty.set()

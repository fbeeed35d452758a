"""Where requests enter the engine, and wait while it is rebuilt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Door:
    """Lets requests in. Invariant: whoever finds it shut waits, and comes in once."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.num_inside = 0
        """On their way in: not yet among vLLM's unfinished requests."""

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        while not self._open.is_set():
            await self._open.wait()
        self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1

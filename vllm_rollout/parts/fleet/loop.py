"""An event loop for a sync client, which waits for several servers at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

END_S = 5.0
"""Most seconds for which an interrupt waits until what it has cancelled is closed."""


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-client", daemon=True)
        self._thread.start()

    def finished(self, awaitable: Awaitable[T]) -> T:
        """Wait for the result of an awaitable. An interrupt cancels the awaitable, and waits for its end."""
        has_ended = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_awaited(awaitable, has_ended), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            has_ended.wait(END_S)
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _awaited(awaitable: Awaitable[T], has_ended: threading.Event) -> T:
    try:
        return await awaitable
    finally:
        has_ended.set()

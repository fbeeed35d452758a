"""Waits that end: what never comes fails its test, at the line that waits for it."""

import asyncio
import time
from collections.abc import Callable

WAIT_S = 120.0
"""Longer than what is awaited takes on a loaded machine, and shorter than a test's time limit."""


async def eventually(condition: Callable[[], object], every_s: float = 0.0) -> None:
    """Return when the condition is true. The default looks once in each turn of the event loop."""
    __tracebackhide__ = True  # pytest then shows the caller's line, which has the condition
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"this condition did not become true within {WAIT_S:.0f} s"
        await asyncio.sleep(every_s)


def wait_until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """Return when the condition is true, for tests and threads without an event loop."""
    __tracebackhide__ = True
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"this condition did not become true within {timeout_s:.0f} s"
        time.sleep(0.02)

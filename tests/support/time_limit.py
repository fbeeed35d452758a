"""A test that waits for what never comes ends all the same."""

import asyncio


def end_within(seconds: float) -> None:
    """From now on the running test has so long; then it is cancelled."""
    asyncio.get_running_loop().call_later(seconds, asyncio.current_task().cancel)

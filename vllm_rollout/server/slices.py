"""Long work in the event loop, in slices. Invariant: whoever works through a list lets others have a turn."""

from __future__ import annotations

import asyncio
import time

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

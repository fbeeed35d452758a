"""Rollouts wait here for places to start a group. Invariant: every place that was taken is given back once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from vllm_rollout.kernel.http.slices import unless
from vllm_rollout.kernel.rules.launch import ALONE, Asker, LaunchWindow, Turn


class Places:
    """Places held by the candidates of one group."""

    def __init__(self, launcher: Launcher, num_candidates: int, asker: Asker) -> None:
        self._launcher = launcher
        self._asker = asker._replace(source=None)  # a group that has begun waits for no later one of its source
        self.num_held = num_candidates

    def release(self, num_candidates: int) -> None:
        """Give back the places of finished candidates, at most as many as are still held."""
        num_released = min(num_candidates, self.num_held)
        self.num_held -= num_released
        if num_released:
            self._launcher.release(num_released)

    def release_all(self) -> None:
        self.release(self.num_held)

    async def take_more(self, num_candidates: int) -> None:
        """Wait until `num_candidates` more candidates may start."""
        places = await self._launcher.take(num_candidates, self._asker)
        self.num_held, places.num_held = self.num_held + places.num_held, 0

    async def take_again(self, num_candidates: int) -> None:
        """Give all places back, and wait until the group may start once more."""
        self.release_all()
        await self.take_more(num_candidates)


class Launcher:
    """A launch window in which groups wait for places."""

    def __init__(self, num_places: int) -> None:
        self.window = LaunchWindow(num_places)
        self._started: dict[Turn, asyncio.Future[None]] = {}

    async def take(self, num_candidates: int, asker: Asker = ALONE) -> Places:
        """Wait until a group of `num_candidates` may start. A caller that is cancelled meanwhile leaves the queue."""
        turn = self.window.ask(num_candidates, asker)
        started = self._started[turn] = asyncio.get_running_loop().create_future()
        self._admit()
        try:
            await started
        except asyncio.CancelledError:
            self.window.withdraw(turn)
            self._started.pop(turn, None)
            self._admit()
            raise
        return Places(self, num_candidates, asker)

    async def take_unless(
        self, stopped: Awaitable[object] | None, num_candidates: int, asker: Asker = ALONE
    ) -> Places | None:
        """Take places as `take` does. If `stopped` is done first, leave the queue and return None."""
        if stopped is None:
            return await self.take(num_candidates, asker)
        taking = asyncio.ensure_future(self.take(num_candidates, asker))
        try:
            return await unless(taking, stopped)
        except asyncio.CancelledError:
            if taking.done() and not taking.cancelled():  # its turn had come, and no caller has these places
                taking.result().release_all()
            raise

    def release(self, num_candidates: int) -> None:
        self.window.release(num_candidates)
        self._admit()

    def _admit(self) -> None:
        for turn in self.window.admit():
            started = self._started.pop(turn)
            if not started.done():  # done: cancelled, and about to withdraw
                started.set_result(None)

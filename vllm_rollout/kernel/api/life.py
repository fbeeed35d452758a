"""Detection of a dead engine. Requests and calls that wait for it fail.

A part may also see ranks die while others live: its face `life` makes the `Life` of an engine client. Without one, the
server ends with its first rank, as vLLM does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_rollout.background import spawn, survived
from vllm_rollout.kernel.parts import faces

LOOK_S = 0.25
"""Seconds between two checks."""


class WatchedClient(Protocol):
    """The part of an engine client that the watch needs."""

    output_processor: Any
    """That of AsyncLLM."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def errored(self) -> bool: ...


class Life:
    """State of the engine behind one engine client. A part overrides `living_ranks` and `look`."""

    def __init__(self, client: WatchedClient) -> None:
        self._client = client
        self._watching: asyncio.Task[None] | None = None

    @property
    def living_ranks(self) -> Sequence[int]:
        """Ranks of this client that have not died."""
        return range(self._client.num_ranks)

    def look(self) -> None:
        """Find ranks that have died since the last look. Called as long as the engine lives."""

    def watch(self) -> None:
        """Start watching, until the engine dies."""
        if self._watching is None or self._watching.done():
            self._watching = spawn(self._watch(), "watching ranks")

    async def _watch(self) -> None:
        while not self._client.errored:
            with survived("watching ranks"):
                self.look()
            await asyncio.sleep(LOOK_S)
        # vLLM fails waiting requests when it reads from a dead engine, but its client may be closed before.
        self._client.output_processor.propagate_error(EngineDeadError())


def life_of(client: WatchedClient) -> Life:
    """The life of an engine, as the last part with a face `life` makes it."""
    makers: list[Callable[[Any], Life]] = [Life, *(make for _, make in faces("life"))]
    return makers[-1](client)

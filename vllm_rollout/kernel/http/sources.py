"""All reports about one group, read as one: of its race, of candidates that are launched later, and of parts.

Invariant: after `close` no source runs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from vllm_rollout.kernel.http.fan_in import FanIn


@dataclass(frozen=True, slots=True)
class LaunchOver:
    """All candidates that were launched together have ended."""


class Sources:
    """Reports about one group."""

    def __init__(self) -> None:
        self._all: FanIn[Any] = FanIn(1)

    def launch(self, candidates: AsyncGenerator[Any, None]) -> None:
        """Also read the reports on candidates that are launched together. `LaunchOver` follows them."""

        async def launched() -> AsyncGenerator[Any, None]:
            async with aclosing(candidates) as reports:
                async for report in reports:
                    yield report
            yield LaunchOver()

        self._all.add(launched())

    def add(self, source: AsyncGenerator[Any, None]) -> None:
        """Also read another source."""
        self._all.add(source)

    def __aiter__(self) -> AsyncIterator[Any]:
        return aiter(self._all)

    async def close(self) -> None:
        """Stop reading. Sources that run are cancelled."""
        await self._all.close()

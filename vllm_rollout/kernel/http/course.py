"""Decides which prompts of a rollout start. Invariant: each prompt is started at most once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Sequence


class Course(ABC):
    """By default, no prompt is left out. Positions are those of the rollout's prompts."""

    @abstractmethod
    def positions(self) -> AsyncIterator[int]:
        """Prompts to start, each as soon as that is decided. Ends when no more will start."""

    def stopped(self) -> Awaitable[object] | None:
        """An awaitable that is done when no prompt may start for now. None: that never happens."""
        return None

    def starts(self, position: int) -> bool:
        """True if the prompt starts, now that there are places for its group."""
        return True


class AllPrompts(Course):
    """Starts every prompt, in the given order."""

    def __init__(self, positions: Sequence[int]) -> None:
        self._positions = positions

    async def positions(self) -> AsyncIterator[int]:
        for position in self._positions:
            yield position

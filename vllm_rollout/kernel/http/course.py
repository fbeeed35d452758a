"""Decides which prompts of a rollout start, and which finished groups are returned. Invariant: each prompt is
started at most once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any

from vllm_rollout.kernel.rules.types import Ending, GroupResult
from vllm_rollout.parts.rounds.rules.round_progress import DeferReason


class Course(ABC):
    """By default, no prompt is left out and every group is returned. Positions are those of the rollout's prompts."""

    @abstractmethod
    def positions(self) -> AsyncIterator[int]:
        """Prompts to start, each as soon as that is decided. Ends when no more will start."""

    def stopped(self) -> Awaitable[object] | None:
        """An awaitable that is done when no prompt may start for now. None: that never happens."""
        return None

    def starts(self, position: int) -> bool:
        """True if the prompt starts, now that there are places for its group."""
        return True

    def said(self, position: int) -> dict[str, Any]:
        """Values that the group's candidates carry for a part, by part."""
        return {}

    def candidate_ended(self, position: int, ending: Ending) -> None:  # noqa: B027  # few courses care
        """A candidate of this prompt's group has ended."""

    def restarted(self, position: int) -> None:  # noqa: B027
        """The group of this prompt runs again. Earlier reports about it are void."""

    async def group_over(self, position: int, result: GroupResult, *, lost: bool) -> DeferReason | None:
        """The reason if the group is deferred. None: it is returned. `lost`: it completed too late to count."""
        return None

    async def graded(self, position: int, rewards: Mapping[int, float | None]) -> None:  # noqa: B027
        """The server has graded the trajectories of this prompt's group. `rewards`: by candidate index, None without
        a reward."""


class AllPrompts(Course):
    """Starts every prompt, in the given order."""

    def __init__(self, positions: Sequence[int]) -> None:
        self._positions = positions

    async def positions(self) -> AsyncIterator[int]:
        for position in self._positions:
            yield position

"""Which prompts of a rollout are started, and what becomes of their groups. Invariant: each is started at most once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence

from vllm_rollout.group.racing.race import RacePlace
from vllm_rollout.group.rounds.round_progress import DeferReason
from vllm_rollout.group.types import Ending, GroupResult


class Course(ABC):
    """One that leaves no prompt out, and returns every group. Positions are those of the rollout's prompts."""

    @abstractmethod
    def positions(self) -> AsyncIterator[int]:
        """Prompts to start, each as soon as it is known that it shall be. It ends when no more will be started."""

    def stopped(self) -> Awaitable[object] | None:
        """Done when no prompt shall start for now; None: that never happens."""
        return None

    def starts(self, position: int) -> bool:
        """There is room for the group of this prompt: whether it starts."""
        return True

    def place(self, position: int) -> RacePlace | None:
        """Its part in a race against the rollout's other groups."""
        return None

    def candidate_ended(self, position: int, ending: Ending) -> None:  # noqa: B027  # few courses care
        """One of the group of this prompt."""

    def restarted(self, position: int) -> None:  # noqa: B027
        """The group of this prompt runs again: what was told of it is void."""

    async def group_over(self, position: int, result: GroupResult, *, lost: bool) -> DeferReason | None:
        """Why the group is deferred; None: it is returned. `lost`: it completed too late to count."""
        return None

    async def graded(self, position: int, rewards: Mapping[int, float | None]) -> None:  # noqa: B027
        """The server has graded what the group of this prompt returns. `rewards`: by index, None without one."""


class AllPrompts(Course):
    """Every prompt starts, in this order."""

    def __init__(self, positions: Sequence[int]) -> None:
        self._positions = positions

    async def positions(self) -> AsyncIterator[int]:
        for position in self._positions:
            yield position

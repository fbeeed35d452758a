"""Rewards on their way to the parts that take them: those that a client posts, and those that the server computes.

Invariant: every posted reward gets a status of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from vllm_rollout.kernel.rules.rewards import NamedReward, Reward, RewardStatus

Filter = Literal["zero_variance"]
"""DAPO's dynamic sampling: leave out groups whose rewards are all the same."""


@dataclass(frozen=True, slots=True)
class Posted:
    """Rewards that come together."""

    rewards: Sequence[NamedReward]
    rollout_id: str | None = None
    """Id of the rollout of all these rewards, as its client knows it. None: they may be of any groups and requests."""
    namespace: str = ""
    """Namespace of the client that has posted them. Names of rollouts and groups begin with it (`owned_name`)."""
    filter: Filter | None = None
    """Filter that the rollout's round must have."""
    by_server: bool = False
    """True if the server has computed them."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Posted rewards that one part takes."""

    statuses: Mapping[int, RewardStatus] = field(default_factory=dict)
    """Statuses by position among the posted rewards. A position that is left out is for other parts."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the answer."""


class RewardTaker(Protocol):
    async def rewarded(self, posted: Posted) -> Taken:
        """Take rewards. Raises: RequestError."""


class RewardDoor:
    """Passes rewards to `takers`, in their order, until each reward has a status."""

    def __init__(self, on_accepted: Callable[[str, list[Reward]], None] = lambda rollout_id, rewards: None) -> None:
        """`on_accepted`: called with the accepted rewards of a rollout that its client has posted."""
        self.takers: list[RewardTaker] = []
        self.on_accepted = on_accepted

    async def tell(self, rewards: Sequence[NamedReward], rollout_id: str | None = None) -> int:
        """Pass on rewards that the server has computed. Returns the number of rewards for forgotten candidates."""
        taken = await self.take(Posted(rewards, rollout_id, by_server=True))
        return sum(status == "unknown" for status in taken.statuses.values())

    async def take(self, posted: Posted) -> Taken:
        """Pass on rewards that come together."""
        statuses: dict[int, RewardStatus] = {}
        fields: dict[str, Any] = {}
        for taker in self.takers:
            if len(statuses) < len(posted.rewards):
                taken = await taker.rewarded(posted)
                statuses, fields = {**taken.statuses, **statuses}, {**fields, **taken.fields}
        return Taken(statuses, fields)

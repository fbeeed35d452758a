"""Rewards on their way to the parts that take them: those that a client posts, and those that the server computes.

Invariant: every posted reward gets a status of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from vllm_rollout.config import MAX_REMEMBERED_CANDIDATES
from vllm_rollout.kernel.http.clients import owned_name
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.rewards import (
    Filter,
    NamedRewardResult,
    NamedRewardsAnswer,
    NamedRewardsRequest,
    RewardCounts,
    RewardResult,
    RewardsAnswer,
    RewardsRequest,
)
from vllm_rollout.kernel.http.slices import each
from vllm_rollout.kernel.rules.rewards import NamedReward, Reward, RewardStatus


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


class RewardDoor:
    """Passes rewards to `takers`, in their order, until each reward has a status."""

    def __init__(self, on_accepted: Callable[[str, list[Reward]], None] = lambda rollout_id, rewards: None) -> None:
        """`on_accepted`: called with the accepted rewards of a rollout that its client has posted."""
        self.takers: list[Callable[[Posted], Awaitable[Taken]]] = []
        """Functions of parts that take rewards. They may raise RequestError."""
        self._on_accepted = on_accepted

    async def post(self, rollout_id: str, request: RewardsRequest, namespace: str) -> RewardsAnswer:
        """Post rewards of a rollout. `namespace`: of the client that owns it.

        Raises: RequestError, 404 for an unknown rollout, 409 for a filter that the rollout does not have.
        """
        name = owned_name(namespace, rollout_id)
        rewards = await each(
            request.rewards, lambda entry: NamedReward("rollout", name, entry.labelled(request.threshold))
        )
        taken = await self._passed(Posted(rewards, rollout_id, namespace, request.filter))
        if not taken.statuses:
            raise RequestError(
                f"no rollout {rollout_id!r} of yours is known here that was asked for with pruning. This server "
                f"remembers the newest rollouts with pruning, up to {MAX_REMEMBERED_CANDIDATES} candidates, until it "
                "ends. Take the id from the rollout's answer, and post rewards before the next restart.",
                status=HTTPStatus.NOT_FOUND,
                param="rollout_id",
            )
        statuses = _statuses(taken, len(rewards))
        pairs = zip(rewards, statuses, strict=True)
        self._on_accepted(rollout_id, [named.reward for named, status in pairs if status == "accepted"])
        results = await each(zip(request.rewards, statuses, strict=True), lambda pair: RewardResult.of(*pair))
        return RewardsAnswer(
            id=rollout_id,
            results=results,
            counts=RewardCounts.of(statuses),
            threshold=request.threshold,
            **{"num_training": 0, "head_version": 0, **taken.fields},
        )

    async def post_named(self, request: NamedRewardsRequest, client: str) -> NamedRewardsAnswer:
        """Post rewards for candidates of any requests and groups. Clients can only name their own."""
        namespace = request.namespace or ""
        rewards = await each(request.rewards, lambda entry: entry.named(request.threshold, client, namespace))
        taken = await self._passed(Posted(rewards, namespace=client))
        statuses = _statuses(taken, len(rewards))
        results = await each(zip(request.rewards, statuses, strict=True), lambda pair: NamedRewardResult.of(*pair))
        return NamedRewardsAnswer(
            results=results,
            counts=RewardCounts.of(statuses),
            threshold=request.threshold,
            **{"num_training": 0, "head_versions": {}, **taken.fields},
        )

    async def tell(self, rewards: Sequence[NamedReward], rollout_id: str | None = None) -> int:
        """Pass on rewards that the server has computed. Returns the number of rewards for forgotten candidates."""
        taken = await self._passed(Posted(rewards, rollout_id, by_server=True))
        return sum(status == "unknown" for status in taken.statuses.values())

    async def _passed(self, posted: Posted) -> Taken:
        statuses: dict[int, RewardStatus] = {}
        fields: dict[str, Any] = {}
        for taker in self.takers:
            if len(statuses) < len(posted.rewards):
                taken = await taker(posted)
                statuses, fields = {**taken.statuses, **statuses}, {**fields, **taken.fields}
        return Taken(statuses, fields)


def _statuses(taken: Taken, num_rewards: int) -> list[RewardStatus]:
    return [taken.statuses.get(position, "unknown") for position in range(num_rewards)]

"""Posted rewards. A round that filters gets the rewards of its groups before they are learned.

Invariant: every posted reward gets a status of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from http import HTTPStatus

from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.rewards import (
    NamedRewardEntry,
    NamedRewardResult,
    NamedRewardsAnswer,
    NamedRewardsRequest,
    RewardCounts,
    RewardResult,
    RewardsAnswer,
    RewardsRequest,
)
from vllm_rollout.kernel.rules.rewards import RewardStatus
from vllm_rollout.parts.pruning.http.service import LearningService
from vllm_rollout.parts.rounds.http.live import LiveRound
from vllm_rollout.parts.rounds.http.rollout_round import RolloutRound


class RunRewards:
    """Takes posted rewards, of rounds and of everything else."""

    def __init__(self, live: Mapping[str, LiveRound], learning: LearningService) -> None:
        """`live`: running rounds, by the id of their rollout."""
        self._live = live
        self._learning = learning

    async def post(self, rollout_id: str, request: RewardsRequest, namespace: str) -> RewardsAnswer:
        """Post rewards for any rollout of one client.

        Raises: RequestError, 404 for an unknown rollout, 409 for a filter that the rollout does not have.
        """
        live = self._filtering(rollout_id, namespace)
        if live is None:
            if request.filter is not None:
                raise RequestError(
                    f"filter: {rollout_id!r} is no round on its way that filters, got {request.filter!r}. Say filter "
                    "in the run or the round, and post rewards while its stream is open.",
                    status=HTTPStatus.CONFLICT,
                    param="filter",
                )
            return await self._learning.post_rewards(rollout_id, request, namespace)
        rewards = [(entry.prompt_id, entry.index, entry.reward) for entry in request.rewards]
        statuses, filtered = await _told(live, rewards)
        if live.rollout.scoring is not None:
            answer = await self._learning.post_rewards(rollout_id, request, namespace)
            return answer.model_copy(update={"filtered": filtered})
        return RewardsAnswer(
            id=rollout_id,
            results=[RewardResult.of(entry, status) for entry, status in zip(request.rewards, statuses, strict=True)],
            counts=RewardCounts.of(statuses),
            threshold=request.threshold,
            num_training=0,
            head_version=0,
            filtered=filtered,
        )

    async def post_named(self, request: NamedRewardsRequest, namespace: str) -> NamedRewardsAnswer:
        """Post rewards by the names of groups and requests."""
        told = await self._tell_rounds(request.rewards, namespace)
        answer = await self._learning.post_named_rewards(request, namespace)
        if not told:
            return answer
        results = [
            NamedRewardResult.of(entry, told[position]) if position in told else result
            for position, (entry, result) in enumerate(zip(request.rewards, answer.results, strict=True))
        ]
        counts = RewardCounts.of(result.status for result in results)
        return answer.model_copy(update={"results": results, "counts": counts})

    def _filtering(self, rollout_id: str, namespace: str) -> RolloutRound | None:
        """The client's running round with this rollout, if the round filters. Else None. Sessions are rewarded as
        they finish."""
        live = self._live.get(rollout_id)
        if not isinstance(live, RolloutRound) or live.rollout.namespace != namespace:
            return None
        return live if live.progress.filters else None

    async def _tell_rounds(self, entries: Sequence[NamedRewardEntry], namespace: str) -> dict[int, RewardStatus]:
        """Pass rewards on to rounds that filter. Returns the statuses, by position, of rewards that only a round
        takes."""
        by_rollout: dict[str, dict[int, tuple[str, int, float]]] = defaultdict(dict)
        for position, entry in enumerate(entries):
            group_id = entry.group_id or ""
            rollout_id = group_id.rpartition("-")[0]
            live = self._filtering(rollout_id, namespace)
            if live is None:
                continue
            if (prompt := live.rollout.prompt_of(group_id)) is not None:
                by_rollout[rollout_id][position] = prompt.id, entry.index, entry.reward
        told: dict[int, RewardStatus] = {}
        for rollout_id, rewards in by_rollout.items():
            filtering = self._live[rollout_id]
            assert isinstance(filtering, RolloutRound)
            statuses, _ = await _told(filtering, list(rewards.values()))
            if filtering.rollout.scoring is None:
                told.update(zip(rewards, statuses, strict=True))
        return told


async def _told(live: RolloutRound, rewards: Sequence[tuple[str, int, float]]) -> tuple[list[RewardStatus], list[str]]:
    """Pass rewards on to the round's course, and record accepted ones for viewers."""
    statuses, filtered = await live.course.reward(rewards)
    live.rollout.seen.rewarded(reward for reward, status in zip(rewards, statuses, strict=True) if status == "accepted")
    return statuses, filtered

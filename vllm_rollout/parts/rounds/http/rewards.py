"""Posted rewards of rounds that filter. Invariant: a round gets the rewards of its groups before they are learned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from http import HTTPStatus

from vllm_rollout.kernel.http.engine import PreparedPrompt, RequestError
from vllm_rollout.kernel.http.reward_door import Posted, Taken
from vllm_rollout.kernel.http.rollout import Rollout
from vllm_rollout.kernel.rules.rewards import NamedReward, RewardStatus
from vllm_rollout.parts.rounds.http.live import LiveRound
from vllm_rollout.parts.rounds.http.rollout_round import RolloutRound


class RunRewards:
    """Takes rewards of rounds that filter. If a round's rollout is scored, its rewards are for learning, too."""

    def __init__(self, live: Mapping[str, LiveRound]) -> None:
        """`live`: running rounds, by the id of their rollout."""
        self._live = live

    async def rewarded(self, posted: Posted) -> Taken:
        """Raises: RequestError, 409 for a filter that the rollout does not have."""
        if posted.by_server:
            return Taken()
        if posted.filter is not None and self._of(posted.rewards[0], posted.namespace) is None:
            raise RequestError(
                f"filter: {posted.rollout_id!r} is no round on its way that filters, got {posted.filter!r}. Say filter "
                "in the run or the round, and post rewards while its stream is open.",
                status=HTTPStatus.CONFLICT,
                param="filter",
            )
        by_round: dict[RolloutRound, dict[int, tuple[str, int, float]]] = defaultdict(dict)
        for position, named in enumerate(posted.rewards):
            if (found := self._of(named, posted.namespace)) is not None:
                live, prompt_id = found
                by_round[live][position] = prompt_id, named.reward.index, named.reward.reward
        statuses: dict[int, RewardStatus] = {}
        filtered: list[str] = []
        for live, rewards in by_round.items():
            told, out = await live.course.reward(list(rewards.values()))
            accepted = (reward for reward, status in zip(rewards.values(), told, strict=True) if status == "accepted")
            live.rollout.rewarded(list(accepted))
            filtered += out
            if not live.rollout.is_scored:
                statuses.update(zip(rewards, told, strict=True))
        return Taken(statuses, {"filtered": filtered} if posted.rollout_id is not None else {})

    def _of(self, named: NamedReward, namespace: str) -> tuple[RolloutRound, str] | None:
        """The running round of a reward, and the id of its prompt there, if the round filters. Else None. Sessions are
        rewarded as they finish."""
        if named.by == "request":
            return None
        id = named.id.removeprefix(f"{namespace}/")
        live = self._live.get(id if named.by == "rollout" else id.rpartition("-")[0])
        if not isinstance(live, RolloutRound) or live.rollout.namespace != namespace or not live.progress.filters:
            return None
        if named.by == "rollout":
            return live, named.reward.prompt_id
        prompt = _prompt_of(live.rollout, id)
        return None if prompt is None else (live, prompt.id)


def _prompt_of(rollout: Rollout, group_id: str) -> PreparedPrompt | None:
    """The prompt of the group with this name. None for any other name."""
    number = group_id.removeprefix(f"{rollout.id}-")
    position = int(number) if number.isascii() and number.isdecimal() else len(rollout.prompts)
    is_known = position < len(rollout.prompts) and rollout.group_id(position) == group_id
    return rollout.prompts[position] if is_known else None

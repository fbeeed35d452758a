"""A running round: connects the events of its groups with the rewards of its trainer.

Invariant: `RoundProgress` makes all decisions. This module waits for them and passes them on.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from vllm_rollout.kernel.http.answers import GroupAnswer
from vllm_rollout.kernel.http.engine import Engine
from vllm_rollout.kernel.http.rollout import Course
from vllm_rollout.kernel.rules.rewards import RewardStatus
from vllm_rollout.kernel.rules.types import CandidateState, Ending, GroupResult
from vllm_rollout.parts.rounds.calls import CUT_RACE, WIDEN_RACE, WiderRace
from vllm_rollout.parts.rounds.rules.race import RacePlace
from vllm_rollout.parts.rounds.rules.round_progress import DeferReason, GroupEnd, RoundProgress
from vllm_rollout.parts.rounds.rules.rounds import OpenRound
from vllm_rollout.parts.rounds.rules.step import PLACE

LOOK_S = 2.0
"""Seconds between checks that the engine is alive, while a round waits for rewards."""


class RoundCourse(Course):
    """The course of a rollout that is a round of a run. Positions are those of the round's entries.

    Overrides: __init__, positions, stopped, starts."""

    def __init__(self, engine: Engine, race_id: str, opened: OpenRound, *, filters: bool) -> None:
        self.progress = RoundProgress(opened, filters)
        self.race_id = race_id
        self.on_filtered: Callable[[str], None] = lambda prompt_id: None
        """Called with the id of each prompt that is filtered."""
        self._engine = engine
        self._position_of = {entry.prompt_id: position for position, entry in enumerate(opened.all_entries)}
        self._changed = asyncio.Event()
        self._cut = asyncio.Event()
        self._ended: dict[int, dict[int, CandidateState]] = defaultdict(dict)
        """States of ended candidates by position and index, in the attempt that counts."""
        self._rewards: dict[int, dict[int, float]] = defaultdict(dict)
        """Rewards of finished candidates by position and index, in the attempt that counts."""
        self._selected: dict[int, Sequence[int]] = {}
        """Indices that need a reward, by position of a returned group."""
        self._num_before = 0
        """Groups that were complete before the round was interrupted. The engine does not count them."""
        self.filtered_tokens = 0
        """Tokens of filtered groups, which would otherwise have been returned."""
        self._num_tokens: dict[int, int] = {}
        self.num_preemptions = 0
        self.lengths: dict[int, list[int]] = {}
        """Tokens of every candidate that ran, by position, whether its group is returned or not."""

    def number_of(self, prompt_id: str) -> int:
        """The number of the prompt's entry."""
        return self.progress.opened.all_entries[self._position_of[prompt_id]].number

    async def positions(self) -> AsyncIterator[int]:
        while not self.progress.is_over:
            position = self.progress.start()
            if position is not None:
                yield position
            elif not self.progress.is_over:
                self._changed.clear()
                await self._change()

    async def _change(self) -> None:
        """Wait for a change. Raises: RequestError if the engine dies while nothing of the round runs."""
        while not self._changed.is_set():
            try:
                async with asyncio.timeout(LOOK_S):  # wait_for of Python 3.11 loses a cancellation that comes with it
                    await self._changed.wait()
            except TimeoutError:
                await self._engine.rank_counts()

    def stopped(self) -> Awaitable[object]:
        return self._cut.wait()

    def starts(self, position: int) -> bool:
        if not self.progress.is_cut:
            return True
        self.progress.withdraw(position)
        return False

    def said(self, position: int) -> dict[str, Any]:
        """Values that the group's candidates carry for their race, by part."""
        if self.progress.opened.kind == "long":  # no race: it runs to its end
            return {}
        return PLACE.value(RacePlace(self.race_id, self._num_to_count, position))

    @property
    def _num_to_count(self) -> int:
        """Number of complete groups after which the engine cuts the race in the same step."""
        return self.progress.num_wanted - self._num_before

    def candidate_ended(self, position: int, ending: Ending) -> None:
        """A candidate of this prompt's group has ended."""
        self._ended[position][ending.index] = ending.state

    def restarted(self, position: int) -> None:
        """The group of this prompt runs again. Earlier reports about it are void."""
        self._ended.pop(position, None)
        self._rewards.pop(position, None)

    async def group_over(self, position: int, result: GroupResult, *, lost: bool) -> DeferReason | None:
        """The reason if the group is deferred. None: it is returned. `lost`: it completed too late to count."""
        self.num_preemptions += sum(ending.num_preemptions for ending in result.endings)
        self.lengths[position] = [ending.num_tokens for ending in result.endings]
        was_cut = self.progress.is_cut
        longest = max((e.num_tokens for e in result.endings if e.index in result.selected), default=0)
        is_deferred = lost or any(ending.state == "deferred" for ending in result.endings)
        self.progress.group_over(position, GroupEnd(result.status == "complete", is_deferred, longest))
        reason, wider = self.progress.reasons.get(position), False
        if reason is None:
            self._selected[position], self._num_tokens[position] = result.selected, result.returned_tokens
            wider = self._look_at(position)
        await self._tell(was_cut, wider=wider)
        return reason

    def ended_before(self, position: int, group: GroupAnswer) -> None:
        """Take over a group that was complete before the round was interrupted. Nothing of the round runs yet."""
        lengths = [trajectory.num_tokens for trajectory in group.trajectories]
        self.lengths[position] = [*lengths, *(candidate.num_tokens for candidate in group.candidates)]
        self._num_tokens[position] = sum(lengths)
        self._num_before += 1
        self.progress.ended_before(position, GroupEnd(True, False, group.lengths.max))
        rewards = [trajectory.reward for trajectory in group.trajectories if trajectory.reward is not None]
        self._decide(position, rewards)

    async def reward(self, rewards: Sequence[tuple[str, int, float]]) -> tuple[list[RewardStatus], list[str]]:
        """Record rewards, each a (prompt id, index, reward). Returns the status of each, and the ids of prompts that
        are filtered out."""
        statuses: list[RewardStatus] = []
        touched: dict[int, str] = {}
        for prompt_id, index, reward in rewards:
            position = self._position_of.get(prompt_id)
            if position is None:
                statuses.append("unknown")
                continue
            if (refusal := self._refusal(position, index)) is not None:
                statuses.append(refusal)
                continue
            known = self._rewards[position].get(index)
            if known is None:
                self._rewards[position][index] = reward
                touched[position] = prompt_id
            statuses.append("accepted" if known is None else "duplicate" if known == reward else "conflict")
        was_cut = self.progress.is_cut
        filtered = [prompt_id for position, prompt_id in touched.items() if self._look_at(position)]
        await self._tell(was_cut, wider=bool(filtered))
        return statuses, filtered

    async def graded(self, position: int, rewards: Mapping[int, float | None]) -> None:
        """The server has graded the trajectories of this prompt's group. `rewards`: by candidate index, None without
        a reward."""
        known = {index: reward for index, reward in rewards.items() if reward is not None}
        self._rewards[position] = known | self._rewards[position]
        was_cut = self.progress.is_cut
        await self._tell(was_cut, wider=self._decide(position, known.values()))

    def _refusal(self, position: int, index: int) -> RewardStatus | None:
        """Reason to refuse a reward for this candidate. None: it is accepted."""
        state = self._ended[position].get(index)
        if state is None:
            return "unknown" if position in self.progress.fates else "unfinished"
        return None if state == "finished" else "unfinished"

    def _look_at(self, position: int) -> bool:
        """Decide on a group if all its trajectories have rewards. True if it is filtered."""
        rewards = self._rewards.get(position, {})
        selected = self._selected.get(position)
        if selected is None or not all(index in rewards for index in selected):
            return False
        return self._decide(position, [rewards[index] for index in selected])

    def _decide(self, position: int, rewards: Collection[float]) -> bool:
        """Decide on a group by its rewards. True if it is filtered."""
        if not self.progress.rewarded(position, rewards):
            return False
        self.filtered_tokens += self._num_tokens[position]
        self.on_filtered(self.progress.opened.all_entries[position].prompt_id)
        return True

    async def _tell(self, was_cut: bool, *, wider: bool) -> None:
        """Notify the engine, since its ranks do not know each other's groups. Then wake waiting tasks, even after an
        error.

        A race is widened before another group enters it.
        """
        is_cut = self.progress.is_cut
        try:
            if self.progress.opened.kind == "short":
                if wider:
                    await self._engine.calls.tell_groups(WIDEN_RACE, WiderRace(self.race_id, self._num_to_count))
                if is_cut and not was_cut and self._engine.num_ranks > 1:
                    await self._engine.calls.tell_groups(CUT_RACE, self.race_id)
        finally:
            if is_cut:
                self._cut.set()
            else:
                self._cut.clear()
            self._changed.set()

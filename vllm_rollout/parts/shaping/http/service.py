"""Redundancy "auto": makes a plan for each prompt from known lengths.

Invariant: every finished group is observed once, whatever set its redundancy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from vllm_rollout.background import spawn
from vllm_rollout.kernel.http.answers import Allocation, RedundancyBudget
from vllm_rollout.kernel.http.engine import Engine, EngineStopped, PreparedPrompt
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.rules.fields import EarlyStop, LaunchRule
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.types import Ending
from vllm_rollout.parts.shaping.http.engine import ShapingPart
from vllm_rollout.parts.shaping.http.metrics import ShapingMetrics
from vllm_rollout.parts.shaping.rules.allocation import (
    BatchAllocation,
    BatchPrompt,
    Budget,
    PromptAllocation,
    allocate_batch,
)
from vllm_rollout.parts.shaping.rules.history import ObservedLength, observed_lengths
from vllm_rollout.parts.shaping.rules.launch_order import launch_order, waiting_groups
from vllm_rollout.parts.shaping.rules.moments import LengthMoments, LengthStatistics


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The plan of one prompt, and the reasons for it."""

    group: GroupPlan
    key: str
    """The prompt's name in the history of lengths."""
    lengths: LengthMoments | None = None
    """Expected lengths of the prompt, else of the data set. None if unknown or not needed."""
    allocation: PromptAllocation | None = None
    """The prompt's share of candidates. None if the request sets their number."""

    def audited(self) -> PromptPlan:
        """A copy of this plan for an audit group."""
        return replace(self, group=self.group.audited())

    def answer(self) -> Allocation:
        fields = {} if self.allocation is None else asdict(self.allocation)
        return Allocation(**{**fields, "num_candidates": self.group.num_candidates, "selection": self.group.selection})


class ShapedRollout(NamedTuple):
    """Plans and start order of a rollout's prompts."""

    plans: list[PromptPlan]
    """One plan per prompt."""
    positions: Sequence[int]
    """Prompts in the order in which they start."""
    budget: RedundancyBudget | None = None
    """The budget of redundancy "auto". None without it."""
    warnings: Sequence[str] = ()


class ShapingService:
    """Reads an engine's history of lengths for rollouts, and adds to it."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._shaping = engine.part(ShapingPart)
        self._metrics = metrics.of(ShapingMetrics)

    async def same(
        self, plan: GroupPlan, keys: Sequence[str], prompts: Sequence[PreparedPrompt], order: LaunchRule, adapter: str
    ) -> ShapedRollout:
        """Give every prompt the same plan. If all candidates run at once on one rank, lengths are not needed."""
        waits = order == "auto" and plan.num_candidates * len(prompts) > self._num_places
        if self._engine.num_ranks == 1 and not waits:
            return ShapedRollout([PromptPlan(plan, key) for key in keys], range(len(keys)))
        history = await self._shaping.length_history(keys, adapter)
        plans = [PromptPlan(plan, *each) for each in zip(keys, _expected(history), strict=True)]
        return ShapedRollout(plans, await self._positions(history, plans, prompts, order))

    async def allocate(
        self,
        plan: GroupPlan,
        keys: Sequence[str],
        prompts: Sequence[PreparedPrompt],
        tradeoff: float,
        early_stop: EarlyStop,
        order: LaunchRule,
        adapter: str,
    ) -> ShapedRollout:
        """Share a budget of candidates among the prompts. Warnings say what could not be done.

        Source: DARTS 4.2, Algorithm 1, and Algorithm 2 for prompts with an extreme tail.
        """
        history = await self._shaping.length_history(keys, adapter)

        def share() -> tuple[BatchAllocation, list[PromptPlan]]:
            batch = allocate_batch(
                [
                    BatchPrompt(lengths, len(prompt.token_ids), prompt.max_tokens)
                    for lengths, prompt in zip(history.prompts, prompts, strict=True)
                ],
                history.dataset,
                self._shaping.cost_model,
                group_size=plan.group_size,
                max_candidates=self._engine.max_num_seqs,
                num_ranks=self._engine.num_ranks,
                tradeoff=tradeoff,
                race=plan,
                num_places=self._num_places,
            )
            plans = batch.plans(plan, early_stop)
            expected = _expected(history)
            return batch, [PromptPlan(*each) for each in zip(plans, keys, expected, batch.prompts, strict=True)]

        # Beside the event loop: 16,384 prompts take a third of a second.
        batch, plans = await asyncio.to_thread(share)
        self._metrics.prompts_allocated(batch.prompts)
        warning = self._budget_warning(batch.budget)
        warnings = [] if warning is None else [warning]
        if plan.selection == "dual_end" and all(allocation.extreme for allocation in batch.prompts):
            warnings.append(
                "dual_end was nowhere applied: every prompt's lengths spread far more than the data set's, and of such "
                "the shortest are returned. Count spare candidates by yourself to keep the longest."
            )
        positions = await self._positions(history, plans, prompts, order)
        return ShapedRollout(plans, positions, RedundancyBudget(**asdict(batch.budget)), warnings)

    @property
    def _num_places(self) -> int:
        return self._engine.max_num_seqs * self._engine.num_ranks

    async def _positions(
        self,
        history: LengthStatistics,
        plans: Sequence[PromptPlan],
        prompts: Sequence[PreparedPrompt],
        order: LaunchRule,
    ) -> Sequence[int]:
        if order == "prompts":
            return range(len(plans))
        num_places = self._num_places

        def positions() -> Sequence[int]:
            limits = (prompt.max_tokens for prompt in prompts)
            return launch_order(waiting_groups((plan.group for plan in plans), history, limits), num_places).positions

        return await asyncio.to_thread(positions)  # beside the event loop, too: 16,384 groups take a second

    def _budget_warning(self, budget: Budget) -> str | None:
        if budget.upper == budget.lower:
            return (
                f"redundancy auto had nothing to give: --max-num-seqs ({self._engine.max_num_seqs}) leaves no spare "
                "candidates. Start the server with a larger one."
            )
        if budget.source != "default":
            return None
        took = f"redundancy auto took {budget.total} candidates, half as many again as wanted"
        if self._shaping.cost_model is None:
            return (
                f"{took}: without a profile their cost is not known. Make one with `vllm-rollout profile` and start "
                "the server with --rollout-profile."
            )
        return f"{took}: this server has not seen any lengths yet."

    def group_over(self, key: str, endings: Iterable[Ending], adapter: str) -> asyncio.Task[None] | None:
        """Begin to report a group's lengths to the engine. None if there are no lengths.

        The report goes on even if the rollout is cancelled.
        """
        lengths = observed_lengths(endings)
        if not lengths:
            return None
        return spawn(self._tell(key, lengths, adapter), "telling lengths")

    async def told(self, tellings: Collection[asyncio.Task[None]]) -> None:
        """Wait until these reports have reached the engine."""
        if tellings:
            await asyncio.wait(tellings)  # unlike gather, it does not cancel them with its caller

    async def _tell(self, key: str, lengths: Sequence[ObservedLength], adapter: str) -> None:
        self._metrics.adapters.know(adapter)
        try:
            await self._shaping.observe_lengths(key, lengths, adapter)
        except EngineStopped:  # reported elsewhere
            return


def _expected(history: LengthStatistics) -> list[LengthMoments | None]:
    return [known or history.dataset for known in history.prompts]

"""Redundancy "auto": makes a plan for each prompt from known lengths.

Invariant: every finished group is observed once, whatever set its redundancy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from vllm_rollout.background import spawn
from vllm_rollout.kernel.http.answers import RedundancyBudget
from vllm_rollout.kernel.http.engine import EngineStopped
from vllm_rollout.kernel.http.plan_port import Draft, Given, GroupPart, GroupRecord, Over, PlanPart, RolloutPart
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.rollout import Rollout
from vllm_rollout.kernel.rules.plan import PromptPlan
from vllm_rollout.kernel.rules.types import Ending
from vllm_rollout.parts.shaping.http.engine import ShapingPart
from vllm_rollout.parts.shaping.http.metrics import ShapingMetrics
from vllm_rollout.parts.shaping.rules.allocation import (
    BatchAllocation,
    BatchPrompt,
    Budget,
    allocate_batch,
)
from vllm_rollout.parts.shaping.rules.history import ObservedLength, observed_lengths
from vllm_rollout.parts.shaping.rules.launch_order import launch_order, waiting_groups
from vllm_rollout.parts.shaping.rules.moments import LengthMoments, LengthStatistics


class ShapingPlan(PlanPart):
    """Reads an engine's history of lengths for rollouts, and adds to it. Overrides: fields, asked."""

    fields = frozenset(("redundancy",))

    def __init__(self, given: Given) -> None:
        self._engine = given.engine
        self._shaping = given.engine.part(ShapingPart)
        self._metrics = given.metrics.of(ShapingMetrics)

    def asked(self, request: RolloutRequest) -> ShapedRollout:
        return ShapedRollout(self)

    async def same(self, draft: Draft) -> None:
        """Keep the same plan for every prompt. If all candidates run at once on one rank, lengths are not needed."""
        waits = draft.request.order == "auto" and draft.plan.num_candidates * len(draft.prompts) > self._num_places
        if self._engine.num_ranks == 1 and not waits:
            return
        history = await self._shaping.length_history([plan.key for plan in draft.plans], draft.adapter)
        expected = zip(draft.plans, _expected(history), strict=True)
        draft.plans = [replace(plan, lengths=lengths) for plan, lengths in expected]
        draft.positions = await self._positions(history, draft)

    async def allocate(self, draft: Draft, tradeoff: float) -> None:
        """Share a budget of candidates among the prompts. Warnings say what could not be done.

        Source: DARTS 4.2, Algorithm 1, and Algorithm 2 for prompts with an extreme tail.
        """
        plan, keys = draft.plan, [plan.key for plan in draft.plans]
        history = await self._shaping.length_history(keys, draft.adapter)

        def share() -> tuple[BatchAllocation, list[PromptPlan]]:
            batch = allocate_batch(
                [
                    BatchPrompt(lengths, len(prompt.token_ids), prompt.max_tokens)
                    for lengths, prompt in zip(history.prompts, draft.prompts, strict=True)
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
            plans = batch.plans(plan, draft.request.early_stop)
            expected = _expected(history)
            return batch, [PromptPlan(*each) for each in zip(plans, keys, expected, batch.prompts, strict=True)]

        # Beside the event loop: 16,384 prompts take a third of a second.
        batch, draft.plans = await asyncio.to_thread(share)
        self._metrics.prompts_allocated(batch.prompts)
        warning = self._budget_warning(batch.budget)
        draft.warnings += [] if warning is None else [warning]
        if plan.selection == "dual_end" and all(allocation.extreme for allocation in batch.prompts):
            draft.warnings.append(
                "dual_end was nowhere applied: every prompt's lengths spread far more than the data set's, and of such "
                "the shortest are returned. Count spare candidates by yourself to keep the longest."
            )
        draft.positions = await self._positions(history, draft)
        draft.budget = RedundancyBudget(**asdict(batch.budget))

    @property
    def _num_places(self) -> int:
        return self._engine.max_num_seqs * self._engine.num_ranks

    async def _positions(self, history: LengthStatistics, draft: Draft) -> Sequence[int]:
        plans = draft.plans
        if draft.request.order == "prompts":
            return range(len(plans))
        num_places = self._num_places

        def positions() -> Sequence[int]:
            limits = (prompt.max_tokens for prompt in draft.prompts)
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

    async def _tell(self, key: str, lengths: Sequence[ObservedLength], adapter: str) -> None:
        self._metrics.adapters.know(adapter)
        try:
            await self._shaping.observe_lengths(key, lengths, adapter)
        except EngineStopped:  # reported elsewhere
            return


class ShapedRollout(RolloutPart):
    """One rollout. Overrides: shape, ready, group, finished."""

    _rollout: Rollout

    def __init__(self, service: ShapingPlan) -> None:
        self._service = service
        self._tellings: list[asyncio.Task[None]] = []
        """Tasks that report lengths to the engine, one per finished group."""

    async def shape(self, draft: Draft) -> None:
        if (tradeoff := draft.request.tradeoff) is None:
            await self._service.same(draft)
        else:
            await self._service.allocate(draft, tradeoff)

    async def ready(self, request: RolloutRequest, rollout: Rollout) -> None:
        self._rollout = rollout

    def group(self, record: GroupRecord) -> GroupPart:
        return ShapedGroup(self, record.position)

    def group_over(self, position: int, endings: Iterable[Ending]) -> None:
        key = self._rollout.plans[position].key
        telling = self._service.group_over(key, endings, self._rollout.adapter)
        if telling is not None:
            self._tellings.append(telling)

    async def finished(self) -> None:
        """Wait until the lengths have reached the engine."""
        if self._tellings:
            await asyncio.wait(self._tellings)  # unlike gather, it does not cancel them with its caller


class ShapedGroup(GroupPart):
    """One group. Overrides: account."""

    def __init__(self, rollout: ShapedRollout, position: int) -> None:
        self._rollout = rollout
        self._position = position

    async def account(self, over: Over) -> None:
        self._rollout.group_over(self._position, over.final)


def _expected(history: LengthStatistics) -> list[LengthMoments | None]:
    return [known or history.dataset for known in history.prompts]

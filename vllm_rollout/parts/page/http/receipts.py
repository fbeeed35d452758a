"""Receipts of finished rollouts (`parts/page/rules/receipt.py`).

Invariant: a receipt costs the event loop next to nothing. Counts of candidates are at hand, and predictions are
computed in a thread.
"""

from __future__ import annotations

import asyncio

from vllm_rollout.kernel.http.rollout import Rollout
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.receipt import Receipt
from vllm_rollout.parts.page.http.watched import SeenGroup, WatchedRollout
from vllm_rollout.parts.page.rules.receipt import RanGroup, receipt_of
from vllm_rollout.parts.shaping.rules.trace import end_of


async def receipt(watched: WatchedRollout) -> Receipt | None:
    """The receipt of a rollout whose groups are over and whose latency is known."""
    rollout = watched.rollout
    groups = [_ran(rollout, group) for _, group in sorted(watched.groups.items())]
    return await asyncio.to_thread(receipt_of, groups, rollout.outcome.timing.latency_s)


def _ran(rollout: Rollout, seen: SeenGroup) -> RanGroup:
    record, plan = seen.record, rollout.plans[seen.record.position]
    ended = [record.ends[index].ending for index in sorted(record.ends)]
    return RanGroup(
        tokens=[ending.num_tokens for ending in ended],
        ends=[end_of(ending) for ending in ended],
        selected=[at for at, ending in enumerate(ended) if ending.index in seen.selected],
        group_size=plan.group.group_size,
        max_tokens=record.prompt.max_tokens,
        resumed=[ending.num_resumed for ending in ended],
        started_s=record.started_s,
        ended_s=[seen.candidates[ending.index].ended_s or 0.0 for ending in ended],
        waited=_waits(plan.group) and not rollout.stops_groups,
        known=plan.lengths,
    )


def _waits(plan: GroupPlan) -> bool:
    """True if no candidate can be stopped, whatever its length."""
    prunes = plan.pruning is not None and plan.pruning.mode == "active"
    return plan.audit or not (prunes or plan.patience is not None or (plan.early_stop and plan.redundancy))

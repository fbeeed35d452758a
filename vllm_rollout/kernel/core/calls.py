"""Calls of API processes to an engine core, beside requests, and the functions that answer them.

vLLM's utility calls reach methods of EngineCore by name, and none of them leads to the scheduler. So one method is
added, `EngineCore.rollout_call`. No code of vLLM calls it. It runs between two engine steps.

Invariant: every operation has one answer: in `ANSWERS`, or in the `answers` of one part. It takes at most
`CALL_BUDGET_S` seconds plus one small piece of work, except for a state that is put.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from vllm.v1.engine.core import EngineCore

from vllm_rollout.adapter.weights import name_weights
from vllm_rollout.kernel.call_table import (
    ABORT_REQUESTS,
    CANCEL_GROUPS,
    GIVE_UP,
    NAME_ADAPTER,
    RANK_COUNTS,
    RECOMPUTE,
    WEIGHT_VERSION,
    Operation,
)
from vllm_rollout.kernel.core.ports import Answers, CorePart
from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.rules.types import RankCounts


def add_rollout_calls() -> None:
    """Make `rollout_call` callable on every engine core of this process."""
    EngineCore.rollout_call = rollout_call  # type: ignore[attr-defined]


def rollout_call(core: EngineCore, operation: str, payload: bytes) -> bytes:
    """Carry out one operation of the call table."""
    row, answer = answered()[operation]
    return row.encode_result(answer(core, row.decode_argument(payload)))


@cache
def answered() -> dict[str, tuple[Operation[Any, Any], Callable[[EngineCore, Any], Any]]]:
    """Operations of the kernel and of parts with their answers, by name."""
    parts: list[CorePart] = [part for _, part in faces("core")]
    rows = [row for answers in (ANSWERS, *(part.answers for part in parts)) for row in answers.items()]
    return {operation.name: (operation, answer) for operation, answer in rows}


def call_worker(core: EngineCore, method: str, *args: Any) -> Any:
    """Call a method of every worker. Returns the answer that is not None: that of the worker whose outputs are read."""
    results: list[Any] = core.collective_rpc(method, args=args)
    return next((result for result in results if result is not None), None)


def _rank_counts(core: EngineCore) -> RankCounts:
    scheduler = core.scheduler
    scheduler.forget_waiting()
    groups, num_changes = scheduler.group_steps.group_counts, scheduler.weights.num_changes
    return RankCounts(groups, scheduler.num_unmet, scheduler.num_internal_errors, num_changes)


ANSWERS: Answers = {
    ABORT_REQUESTS: lambda core, names: core.scheduler.abort_named(frozenset(names)),
    RECOMPUTE: lambda core, names: core.scheduler.recompute(None if names is None else frozenset(names)),
    CANCEL_GROUPS: lambda core, group_ids: core.scheduler.cancel_groups(group_ids),
    GIVE_UP: lambda core, candidates: core.scheduler.give_up(candidates),
    WEIGHT_VERSION: lambda core, adapter: core.scheduler.weights.newest_of(adapter),
    NAME_ADAPTER: lambda core, named: name_weights(core, named[1], named[0]),
    RANK_COUNTS: lambda core, _: _rank_counts(core),
}
"""The kernel's answers."""

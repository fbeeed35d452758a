"""A group that is over -> the trajectories it returns. Invariant: the order of the endings does not matter."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import NamedTuple

from vllm_rollout.group.plans.plan import GroupPlan
from vllm_rollout.group.types import STOP_STATES, Ending, GroupResult


class GroupLengths(NamedTuple):
    """Token counts of a group's returned trajectories."""

    mean: float
    std: float
    max: int


def conclude(
    plan: GroupPlan, endings: Iterable[Ending], lost_why: str | None = None, void: Collection[int] = ()
) -> GroupResult:
    """Select what a finished group returns, and say why when it falls short. `lost_why`: what its end came from, if
    from outside. `void`: indices that must not count.

    With `allow_fewer` pruning may leave fewer than `group_size` candidates: then all of those make a complete group.

    Source: DARTS 4.1.2 and Algorithm 2 (dual-end: K shortest + L longest, K + L = M).
    """
    endings = tuple(sorted(endings, key=lambda e: e.index))
    pool = [e for e in endings if e.state == "finished" and e.index not in void]
    selected = tuple(sorted(e.index for e in _select(plan, pool)))
    num_wanted = _num_wanted(plan, endings)
    if len(selected) >= num_wanted:
        return GroupResult("complete", None, selected, endings)
    counts = {"void": len(void)} | {state: sum(e.state == state for e in endings) for state in ("failed", *STOP_STATES)}
    others = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    reason = f"{len(pool)} of {len(endings)} candidates finished, group_size is {plan.group_size}"
    if num_wanted < plan.group_size:
        reason += f", of which pruning left {num_wanted}"
    if others:
        reason += f" ({others})"
    return GroupResult("incomplete", f"{reason}: {lost_why}" if lost_why else reason, selected, endings)


def deferred(result: GroupResult, why: str) -> GroupResult:
    """The same group, of which nothing is returned now."""
    return replace(result, status="deferred", reason=why, selected=())


def _num_wanted(plan: GroupPlan, endings: Sequence[Ending]) -> int:
    """Trajectories that make the group complete; at least one, so that an empty group never is."""
    if plan.pruning is None or not plan.pruning.allow_fewer:
        return plan.group_size
    num_pruned = sum(e.state == "pruned" for e in endings)
    return max(1, min(plan.group_size, plan.num_candidates - num_pruned))


def _select(plan: GroupPlan, pool: Sequence[Ending]) -> list[Ending]:
    valid = [e for e in pool if e.valid]
    truncated = sorted((e for e in pool if not e.valid), key=_by_length)
    # A truncated candidate only fills a gap, and always among the shortest.
    num_gaps = max(0, plan.group_size - len(valid))
    fill = truncated[:num_gaps]
    if plan.selection == "dual_end":
        ranked = sorted(valid, key=_by_length)
        num_longest = min(plan.num_longest, len(ranked))
        longest = ranked[len(ranked) - num_longest :]
        shortest = ranked[: len(ranked) - num_longest][: plan.group_size - num_longest]
        return [*shortest, *fill, *longest]
    order = _by_length if plan.selection == "shortest" else _by_finish
    return [*sorted(valid, key=order)[: plan.group_size], *fill]


def _by_length(ending: Ending) -> tuple[int, int]:
    return (ending.num_tokens, ending.index)


def _by_finish(ending: Ending) -> tuple[int, int, int]:
    return (ending.end_step, ending.num_tokens, ending.index)


def lengths_of(num_tokens: Sequence[int]) -> GroupLengths:
    """Mean, population standard deviation and maximum, in tokens; zeros for nothing."""
    if not num_tokens:
        return GroupLengths(0.0, 0.0, 0)
    return GroupLengths(fmean(num_tokens), pstdev(num_tokens), max(num_tokens))

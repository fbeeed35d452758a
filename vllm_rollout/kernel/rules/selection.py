"""Selects the trajectories that a group returns when it is over.

Invariant: the order of the endings does not matter.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable
from dataclasses import replace

from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.types import STOP_STATES, Ending, GroupResult


def conclude(
    plan: GroupPlan, endings: Iterable[Ending], lost_why: str | None = None, void: Collection[int] = ()
) -> GroupResult:
    """Select the trajectories that a finished group returns, and give a reason if these are too few.

    `lost_why`: the cause of the group's end, if that came from outside. `void`: indices that must not count. With
    `allow_fewer`, pruning may leave fewer than `group_size` candidates: then all of those make a complete group.

    Source: DARTS 4.1.2 and Algorithm 2 (dual-end: K shortest + L longest, K + L = M).
    """
    endings = tuple(sorted(endings, key=lambda e: e.index))
    pool = [e for e in endings if e.state == "finished" and e.index not in void]
    ranking = Ranking(plan)
    for ending in pool:
        ranking.add(ending)
    selected = tuple(sorted(ranking.selected))
    wanted = num_wanted(plan, sum(e.state == "pruned" for e in endings))
    if len(selected) >= wanted:
        return GroupResult("complete", None, selected, endings)
    counts = {"void": len(void)} | {state: sum(e.state == state for e in endings) for state in ("failed", *STOP_STATES)}
    others = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    reason = f"{len(pool)} of {len(endings)} candidates finished, group_size is {plan.group_size}"
    if wanted < plan.group_size:
        reason += f", of which pruning left {wanted}"
    if others:
        reason += f" ({others})"
    return GroupResult("incomplete", f"{reason}: {lost_why}" if lost_why else reason, selected, endings)


def deferred(result: GroupResult, why: str) -> GroupResult:
    """Return the result of the same group as deferred: it returns no trajectory now."""
    return replace(result, status="deferred", reason=why, selected=())


def num_wanted(plan: GroupPlan, num_pruned: int) -> int:
    """Trajectories that make the group complete. At least one, so that an empty group is never complete."""
    if plan.pruning is None or not plan.pruning.allow_fewer:
        return plan.group_size
    return max(1, min(plan.group_size, plan.num_candidates - num_pruned))


class Ranking:
    """Finished candidates in the orders by which a plan selects."""

    def __init__(self, plan: GroupPlan) -> None:
        self._group_size, self._rule = plan.group_size, plan.selection
        self._num_longest = plan.num_longest if plan.selection == "dual_end" else 0
        self._valid: list[tuple[int, ...]] = []
        """Sort keys. The last item of each is the candidate's index."""
        self._truncated: list[tuple[int, ...]] = []

    def add(self, ending: Ending) -> None:
        keys, key = self._place(ending)
        insort(keys, key)

    @property
    def selected(self) -> list[int]:
        """Indices of the selected candidates, unordered. A truncated candidate only fills a gap among the shortest."""
        num_longest = min(self._num_longest, len(self._valid))
        others = len(self._valid) - num_longest
        shortest = self._valid[: min(others, self._group_size - num_longest)]
        return [key[-1] for key in (*shortest, *self._truncated[: self._num_gaps], *self._valid[others:])]

    @property
    def _num_gaps(self) -> int:
        return max(0, self._group_size - len(self._valid))

    def _place(self, ending: Ending) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
        """The list in which the candidate stands, and its sort key there."""
        by_length = (ending.num_tokens, ending.index)
        if not ending.valid:
            return self._truncated, by_length
        return self._valid, (ending.end_step, *by_length) if self._rule == "first" else by_length

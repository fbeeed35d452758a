"""Selects the trajectories that a group returns when it is over.

Invariant: the order of the endings does not matter.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import NamedTuple

from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.types import STOP_STATES, Ending, GroupResult


class GroupLengths(NamedTuple):
    """Token counts of a group's returned trajectories."""

    mean: float
    std: float
    max: int


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


def num_to_refill(group_size: int, max_candidates: int, num_launched: int, num_alive: int) -> int:
    """Candidates to launch in place of void ones: as many as `num_alive` is below `group_size`.

    Args:
        num_alive: candidates that are running, or have finished and are not void.
    """
    return max(0, min(max_candidates - num_launched, group_size - num_alive))


class Ranking:
    """Finished candidates in the orders by which a plan selects. No operation takes a Python loop over all of them."""

    def __init__(self, plan: GroupPlan) -> None:
        self._group_size, self._rule = plan.group_size, plan.selection
        self._num_longest = plan.num_longest if plan.selection == "dual_end" else 0
        self._valid: list[tuple[int, ...]] = []
        """Sort keys. The last item of each is the candidate's index."""
        self._truncated: list[tuple[int, ...]] = []

    def __len__(self) -> int:
        return len(self._valid) + len(self._truncated)

    def add(self, ending: Ending) -> None:
        keys, key = self._place(ending)
        insort(keys, key)

    def drop(self, ending: Ending) -> int | None:
        """Remove a candidate. If it was selected, return the index of the candidate that is selected instead, or
        None."""
        keys, key = self._place(ending)
        at = bisect_left(keys, key)
        if key not in keys[at : at + 1]:
            return None
        gaps, num_longest = self._num_gaps, min(self._num_longest, len(self._valid))
        num_shortest = self._group_size - num_longest
        del keys[at]
        if keys is self._truncated:
            return keys[gaps - 1][-1] if at < gaps <= len(keys) else None
        if num_shortest <= at < len(keys) + 1 - num_longest:
            return None
        if gaps := self._num_gaps:
            return self._truncated[gaps - 1][-1] if gaps <= len(self._truncated) else None
        return keys[num_shortest - 1 if at < num_shortest else len(keys) - num_longest][-1]

    @property
    def num_selected(self) -> int:
        return min(self._group_size, len(self))

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
        if not ending.valid:
            return self._truncated, _by_length(ending)
        return self._valid, _by_finish(ending) if self._rule == "first" else _by_length(ending)


def _by_length(ending: Ending) -> tuple[int, int]:
    return (ending.num_tokens, ending.index)


def _by_finish(ending: Ending) -> tuple[int, int, int]:
    return (ending.end_step, ending.num_tokens, ending.index)


def lengths_of(num_tokens: Sequence[int]) -> GroupLengths:
    """Mean, population standard deviation and maximum, in tokens. Zeros if `num_tokens` is empty."""
    if not num_tokens:
        return GroupLengths(0.0, 0.0, 0)
    return GroupLengths(fmean(num_tokens), pstdev(num_tokens), max(num_tokens))

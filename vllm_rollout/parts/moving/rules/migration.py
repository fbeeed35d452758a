"""Chooses groups to move to another rank, and checks that the move pays.

A move is priced by the tokens that its target computes or receives (`load.price_s`), since unpriced greedy moves of
long candidates make the tail longer.

Invariants: a plan moves a group at most once, whole, and never onto a held rank. At its predicted peak it fits a
target's KV cache and its `max_num_seqs`, except for a drain without a choice. Without a gain a plan is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

from vllm_rollout.parts.moving.rules.load import GroupLoad, RankLoad, end_s
from vllm_rollout.parts.shaping.rules.cost import CostModel

MoveOutcome = Literal["moved", "over", "stays", "failed", "lost"]
"""Result of a move.

moved   the group goes on in the other engine
over    the group ended before it could leave
stays   the group cannot leave, for a reason
failed  the other engine did not take it, and it goes on where it was
lost    neither engine could take it: its candidates fail
"""

MAX_DELAY = 0.05
"""Largest share by which a consolidation may delay the end of the step.

It bounds the expected end, and the end if all candidates go on for long (`RankLoad.late`). Averages would promise a
target that most arriving candidates end soon.
"""
OWN_SHARE = 1 / 3
"""Share of a rank's own late delay that counts as well, since any rank may turn out to have the last candidate.

With the whole delay, almost no group would move (docs/development/log.md).
"""
MIN_FREED = 0.2
"""Least share of the remaining rank-seconds that a consolidation has to free. Many small consolidations delay the
end more than they free (docs/development/log.md)."""
MIN_SOONER = 0.1
"""Least share by which a spread has to bring the end of the lagging rank forward."""
LAG = 1.5
"""A rank lags when its predicted end is this many times as far away as the median of the others'."""
NEARLY_EMPTY = 0.25
"""A rank is nearly empty with at most this share of the lagging rank's candidates."""


LOOK_EVERY = 0.05
"""Share of the candidates that must end before the next look, of those left at the last one. Looks come more often
as ranks run empty."""


def is_look_due(num_left: int, num_left_at_look: int) -> bool:
    """True if enough candidates have ended since moves were last planned."""
    return num_left <= (1 - LOOK_EVERY) * num_left_at_look


@dataclass(frozen=True, slots=True)
class PlannedMove:
    group_id: str
    source: int
    """Rank that the group leaves."""
    target: int
    """Rank that the group moves to."""


@dataclass(frozen=True, slots=True)
class Consolidation:
    """Moves that empty whole ranks."""

    moves: tuple[PlannedMove, ...] = ()
    freed_s: float = 0.0
    """Freed rank-seconds, less the rank-seconds added on the targets."""
    delay: float = 0.0
    """Share by which the last candidate of all ends later, with all consolidations of the step so far."""

    @property
    def ranks(self) -> frozenset[int]:
        """Ranks that are emptied."""
        return frozenset(move.source for move in self.moves)


def plan_consolidation(
    cost: CostModel,
    loads: Sequence[RankLoad],
    delay: float = 0.0,
    *,
    max_delay: float = MAX_DELAY,
    min_freed: float = MIN_FREED,
) -> Consolidation:
    """Empty whole ranks if that pays. A half-empty rank would free nothing.

    A rank is busy until its predicted end. The rank-seconds of a step are the sum over ranks. Emptied ranks give theirs
    back. The targets take longer, by the larger PTL of all their candidates and by the price of arriving groups. It
    pays if the sum falls by more than `min_freed`, and if all consolidations of a step together delay its end by at
    most `max_delay`. The delay also counts candidates that go on for long. Ranks are emptied in the order of their
    load, and the number of emptied ranks is the one that frees the most.

    delay: `Consolidation.delay` of the last consolidation of this step. Shares multiply, as if each lasted to the end.
    Predicted ends come too soon, so that delays in seconds would allow too much.
    """
    ranks = [load for load in loads if load.groups and not load.is_held]
    ends = {load.rank: end_s(cost, load) for load in loads}
    busy_s = sum(ends[load.rank] for load in ranks)
    last_s = max(ends.values(), default=0.0)
    late_ends = {load.rank: end_s(cost, load.late) for load in loads}
    best = Consolidation(freed_s=min_freed * busy_s)
    ranks.sort(key=lambda load: (load.other_requests > 0, load.room.remaining_tokens))
    num_movable = sum(not load.other_requests for load in ranks)
    for num_emptied in range(1, min(num_movable, len(ranks) - 1) + 1):
        sources, targets = ranks[:num_emptied], ranks[num_emptied:]
        moves = place_all(sources, targets)
        if moves is None:
            continue
        after = ends | {load.rank: 0.0 for load in sources} | _ends_after(cost, sources, targets, moves)
        freed_s = busy_s - sum(after[load.rank] for load in ranks)
        late_after = _ends_after(cost, [load.late for load in sources], [load.late for load in targets], moves)
        delays = [
            max(after.values()) / last_s - 1,
            max((late_ends | late_after).values()) / max(late_ends.values()) - 1,
            *(OWN_SHARE * (late_s / late_ends[rank] - 1) for rank, late_s in late_after.items()),
        ]
        delay_after = (1 + delay) * (1 + max(delays)) - 1
        if freed_s > best.freed_s and delay_after <= max_delay:
            best = Consolidation(tuple(moves), freed_s, delay_after)
    return best if best.moves else Consolidation(delay=delay)


def plan_spread(cost: CostModel, loads: Sequence[RankLoad], min_sooner: float = MIN_SOONER) -> list[PlannedMove]:
    """Move groups from the rank that ends last to ranks that are nearly empty, as long as it lags and that pays.

    It pays when the later end of the two ranks, with the price at the target, comes `min_sooner` earlier. Then the PTL
    saved over later steps is worth more than the price.
    """
    ranks = {load.rank: load for load in loads}
    ends = {load.rank: end_s(cost, load) for load in loads}
    arrived: dict[int, list[GroupLoad]] = {load.rank: [] for load in loads}
    moves: list[PlannedMove] = []
    while len(ranks) > 1:
        source = max(ends, key=lambda rank: ends[rank])
        if ends[source] <= LAG * median(end for rank, end in ends.items() if rank != source):
            break
        best = _soonest(cost, ranks, arrived, source)
        if best is None or best.later_s > (1 - min_sooner) * ends[source]:
            break
        group, target = best.group, best.target
        moves.append(PlannedMove(group.group_id, source, target))
        ranks[source] = ranks[source].without_group(group.group_id)
        ranks[target] = ranks[target].with_group(group)
        arrived[target].append(group)
        for rank in (source, target):
            ends[rank] = end_s(cost, ranks[rank], arrived[rank])
    return moves


def plan_drain(loads: Sequence[RankLoad], *drained: int) -> list[PlannedMove]:
    """Find a target for every group of these ranks: the rank with the least predicted load among those with room.

    If none has room, the least full rank is taken: candidates then wait there, or are preempted. Empty when every other
    rank is held.

    Raises: ValueError for an unknown rank.
    """
    by_rank = {load.rank: load for load in loads}
    for rank in drained:
        if rank not in by_rank:
            raise ValueError(f"rank must be one of {sorted(by_rank)}, got {rank}")
    targets = [load for load in loads if not load.is_held and load.rank not in drained]
    return place_all([by_rank[rank] for rank in drained], targets, must_fit=False) or []


class _Spread(NamedTuple):
    later_s: float
    """Predicted end of the two ranks, in seconds: the later one."""
    group: GroupLoad
    target: int


def _soonest(
    cost: CostModel, ranks: Mapping[int, RankLoad], arrived: Mapping[int, Sequence[GroupLoad]], source: int
) -> _Spread | None:
    """The move from this rank with the earliest later end of both ranks. Groups that arrived by a move stay."""
    few = NEARLY_EMPTY * ranks[source].num_candidates
    targets = [load for load in ranks.values() if not load.is_held and load.num_candidates + load.other_requests <= few]
    found = []
    for group in ranks[source].groups:
        holding = [load for load in targets if load.room.holds(group)]
        if group in arrived[source] or not holding:
            continue
        target = min(holding, key=lambda load: load.room.remaining_tokens)
        ends = (
            end_s(cost, ranks[source].without_group(group.group_id), arrived[source]),
            end_s(cost, target.with_group(group), [*arrived[target.rank], group]),
        )
        found.append(_Spread(max(ends), group, target.rank))
    return min(found, key=lambda spread: spread.later_s, default=None)


def place_all(
    sources: Iterable[RankLoad], targets: Iterable[RankLoad], *, must_fit: bool = True
) -> list[PlannedMove] | None:
    """Move each group of the sources to the target with the least predicted load and enough room, the longest first.

    If no target has room, return None, or without `must_fit` use the least full one.
    """
    rooms = {load.rank: load.room for load in targets}
    moves = []
    groups = [(group, load.rank) for load in sources for group in load.groups]
    for group, source in sorted(groups, key=lambda found: -found[0].total_remaining):
        holding = [rank for rank, room in rooms.items() if room.holds(group)]
        if holding:
            target = min(holding, key=lambda rank: rooms[rank].remaining_tokens)
        elif must_fit or not rooms:
            return None
        else:
            target = min(rooms, key=lambda rank: (-rooms[rank].kv_tokens, rooms[rank].remaining_tokens))
        rooms[target] = rooms[target].after(group)
        moves.append(PlannedMove(group.group_id, source, target))
    return moves


def _ends_after(
    cost: CostModel, sources: Iterable[RankLoad], targets: Iterable[RankLoad], moves: Iterable[PlannedMove]
) -> dict[int, float]:
    """Predicted end of each target, with the groups that arrive there, in seconds."""
    groups = {group.group_id: group for load in sources for group in load.groups}
    arrived: dict[int, list[GroupLoad]] = {load.rank: [] for load in targets}
    loads = {load.rank: load for load in targets}
    for move in moves:
        group = groups[move.group_id]
        arrived[move.target].append(group)
        loads[move.target] = loads[move.target].with_group(group)
    return {rank: end_s(cost, load, arrived[rank]) for rank, load in loads.items()}

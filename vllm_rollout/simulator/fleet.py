"""All ranks of a rollout on one clock, so that groups can move from one to another.

Invariant: with one rank, or as long as nothing moves, every rank runs as it would alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_rollout.group.judging.judge import Judge
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.mover import Mover
from vllm_rollout.simulator.race import Race
from vllm_rollout.simulator.rank import Rank, RankRun


@dataclass(frozen=True, slots=True)
class FleetRun:
    """What became of a rollout."""

    ranks: Sequence[RankRun]
    num_moves: int = 0
    freed_rank_s: float = 0.0

    @property
    def seconds(self) -> float:
        return max(rank.seconds for rank in self.ranks)


def run_fleet(machine: Machine, judges: Sequence[Judge], races: Sequence[Sequence[Race]]) -> FleetRun:
    """To the end of the last race; `races`: of each rank."""
    ranks = [Rank(machine, judge, f"{number}/") for number, judge in enumerate(judges)]
    for rank, own in zip(ranks, races, strict=True):
        for race in own:
            rank.launch(race)
    mover = Mover(machine, ranks, sum(race.plan.num_candidates for own in races for race in own))
    while (rank := _next(ranks)) is not None:
        seconds = rank.next.seconds
        closed = rank.go_on()
        if closed is not None:
            mover.ended(closed.num_ended)
            mover.look(seconds)
    end_s = max(rank.seconds for rank in ranks)
    return FleetRun([rank.over() for rank in ranks], mover.num_moves, mover.freed_s(end_s))


def _next(ranks: Sequence[Rank]) -> Rank | None:
    """The first; of those at one time, steps end before others begin. None: all are done."""
    happenings = [
        (happening.seconds, happening.phase != "close", number)
        for number, rank in enumerate(ranks)
        if (happening := rank.next) is not None
    ]
    return ranks[min(happenings)[2]] if happenings else None

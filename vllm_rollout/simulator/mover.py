"""Looks at all ranks of a rollout and moves groups between them.

A look is due when enough candidates have ended since the last one. A group leaves between two steps of its rank, and
joins the target's line between two of its steps.

Invariant: what moves is decided by `group/ranks/migration.py` and `group/ranks/scaling.py`. A freed rank takes nothing
more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_rollout.group.ranks.load import RankLoad
from vllm_rollout.group.ranks.migration import PlannedMove, is_look_due, plan_consolidation, plan_spread
from vllm_rollout.group.ranks.scaling import Progress, plan_scale_down
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.rank import Departed, Rank


class Mover:
    """Of one rollout."""

    def __init__(self, machine: Machine, ranks: Sequence[Rank], num_candidates: int, message_s: float = 0.0) -> None:
        """message_s: from whoever looks to a rank."""
        self._machine = machine
        self._ranks = ranks
        self._message_s = message_s
        self._num_candidates = self._num_left = self._num_left_at_look = num_candidates
        self._num_complete_at_check = 0
        self._is_scaled_down = False
        self._freed: set[int] = set()
        self._delay = 0.0
        """By consolidations, as predicted."""
        self.num_moves = 0

    def freed_s(self, end_s: float) -> float:
        """Seconds from each freed rank's last step to the end of the rollout, summed."""
        return sum(end_s - self._ranks[number].seconds for number in self._freed)

    def ended(self, num_candidates: int) -> None:
        self._num_left -= num_candidates

    def look(self, seconds: float) -> None:
        """Move what should move, if a look is due. All candidates have been launched."""
        if not is_look_due(self._num_left, self._num_left_at_look):
            return
        if any(rank.num_unread for rank in self._ranks):  # groups are on their way
            return
        self._num_left_at_look = self._num_left
        machine = self._machine
        loads = [
            RankLoad(
                number,
                tuple(rank.loads_at(seconds)),
                kv_capacity_tokens=machine.kv_capacity_tokens,
                max_num_seqs=machine.num_slots,
                is_held=number in self._freed,
                transfer=machine.transfer,
            )
            for number, rank in enumerate(self._ranks)
        ]
        if machine.scale_down == "auto" and self._scale_down(seconds, loads):
            return
        if machine.migration in ("spread", "auto") and (moves := plan_spread(machine.step_cost, loads)):
            self._move(seconds, moves)
        elif machine.migration in ("consolidate", "auto"):
            plan = plan_consolidation(machine.step_cost, loads, self._delay)
            self._delay = plan.delay
            self._free(seconds, plan.ranks, plan.moves)

    def _scale_down(self, seconds: float, loads: Sequence[RankLoad]) -> bool:
        num_complete = self._num_candidates - self._num_left
        progress = Progress(self._num_candidates, num_complete, self._num_complete_at_check, self._is_scaled_down)
        advice = plan_scale_down(progress, loads)
        if advice.was_checked:
            self._num_complete_at_check = num_complete
        if not advice.ranks:
            return False
        self._is_scaled_down = True
        self._free(seconds, advice.ranks, advice.moves)
        return True

    def _free(self, seconds: float, ranks: Iterable[int], moves: Sequence[PlannedMove]) -> None:
        self._freed.update(ranks)
        self._move(seconds, moves)

    def _move(self, seconds: float, moves: Sequence[PlannedMove]) -> None:
        for move in moves:
            target = self._ranks[move.target]

            def deliver(at_s: float, departed: Departed, target: Rank = target) -> None:
                self.num_moves += 1
                target.receive(departed, at_s)

            self._ranks[move.source].send_away(move.group_id, seconds + self._message_s, deliver)

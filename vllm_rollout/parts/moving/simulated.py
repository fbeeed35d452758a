"""Groups on several simulated ranks: where they start, and how they move between ranks on one clock.

A look at the loads is due when enough candidates have ended since the last look. A group leaves its rank between two
steps, and joins the target's line between two steps.

Invariant: with one rank, or as long as no group moves, every rank runs as it would alone.
`parts/moving/rules/migration.py` and `parts/moving/rules/scaling.py` decide the moves. A freed rank accepts no further
group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_rollout.kernel.rules.step import GroupSteps
from vllm_rollout.parts.moving.rules.load import GroupLoad, RankLoad, TransferCost
from vllm_rollout.parts.moving.rules.migration import PlannedMove, is_look_due, plan_consolidation, plan_spread
from vllm_rollout.parts.moving.rules.placement import Placement
from vllm_rollout.parts.moving.rules.scaling import Progress, plan_scale_down
from vllm_rollout.parts.moving.rules.work import TokenCost, Work
from vllm_rollout.simulator.machine import FleetRun, Machine
from vllm_rollout.simulator.race import Race
from vllm_rollout.simulator.rank import Departed, Rank


class Places:
    """The places of groups on several ranks. Invariant: ranks are chosen as a server does."""

    def __init__(self, machine: Machine) -> None:
        """Tokens are weighed by step costs, or all alike on an ideal machine."""
        self.num_ranks = machine.num_ranks
        self._placement = Placement(machine.num_ranks)
        if (cost := machine.known_cost) is not None:
            self._placement.token_cost = TokenCost.of(cost)
        self._placed: dict[Race, tuple[int, Work]] = {}
        """Rank and remaining work of each group."""

    def place(self, race: Race) -> int:
        work = _work_of(race, [0] * race.plan.num_candidates)
        rank = self._placement.place(work)
        self._placed[race] = rank, work
        return rank

    def note(self, race: Race, num_tokens: Sequence[int]) -> None:
        rank, before = self._placed[race]
        work = _work_of(race, num_tokens)
        self._placement.change(rank, before, work)
        self._placed[race] = rank, work

    def leave(self, race: Race) -> None:
        self._placement.leave(*self._placed.pop(race))


def _work_of(race: Race, num_tokens: Sequence[int]) -> Work:
    """Work of candidates that have `num_tokens` tokens each."""
    return Work.of(num_tokens, race.lengths, race.max_tokens, race.prompt_tokens)


def transfer_cost(kv_bytes_per_token: float, block_size: int) -> TransferCost:
    """Assumed cost of KV that moves along. `kv_bytes_per_token`: of one device."""
    return TransferCost.assumed(kv_bytes_per_token, block_size)


class Mover:
    """Moves the groups of one rollout between ranks."""

    def __init__(self, machine: Machine, ranks: Sequence[Rank], num_candidates: int, message_s: float = 0.0) -> None:
        """`message_s`: seconds of a message to a rank."""
        self._machine = machine
        self._ranks = ranks
        self._message_s = message_s
        self._num_candidates = self._num_left = self._num_left_at_look = num_candidates
        self._num_complete_at_check = 0
        self._is_scaled_down = False
        self._freed: set[int] = set()
        self._delay = 0.0
        """Predicted delay of the rollout's end by all consolidations, as a share."""
        self.num_moves = 0

    def freed_s(self, end_s: float) -> float:
        """Seconds from each freed rank's last step to the end of the rollout, summed."""
        return sum(end_s - self._ranks[number].seconds for number in self._freed)

    def ended(self, num_candidates: int) -> None:
        self._num_left -= num_candidates

    def look(self, seconds: float) -> None:
        """Move groups, if a look is due. All candidates must have been launched."""
        if not is_look_due(self._num_left, self._num_left_at_look):
            return
        if any(rank.num_unread for rank in self._ranks):  # groups are on their way
            return
        self._num_left_at_look = self._num_left
        machine = self._machine
        loads = [
            RankLoad(
                number,
                tuple(
                    GroupLoad.of(id, race.prompt_tokens, num_tokens, race.lengths, race.max_tokens)
                    for id, race, num_tokens in rank.running_at(seconds)
                ),
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

            def deliver(at_s: float, departed: Departed, number: int = move.target) -> None:
                self.num_moves += 1
                departed.race.moves.append((at_s, number))
                self._ranks[number].receive(departed, at_s)

            self._ranks[move.source].send_away(move.group_id, seconds + self._message_s, deliver)


def run_fleet(machine: Machine, learned: Sequence[GroupSteps], races: Sequence[Sequence[Race]]) -> FleetRun:
    """Run all races to their end. `learned`, `races`: by rank."""
    ranks = [Rank(machine, steps, f"{number}/") for number, steps in enumerate(learned)]
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
    """The rank with the earliest event, or None if all are done. At one time, ends of steps come before other
    events."""
    happenings = [
        (happening.seconds, happening.phase != "close", number)
        for number, rank in enumerate(ranks)
        if (happening := rank.next) is not None
    ]
    return ranks[min(happenings)[2]] if happenings else None

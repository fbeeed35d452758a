"""One round of a run, over all ranks.

Each rank decides about its groups in its own step. The API process (here, `RoundProgress`) counts complete groups over
all ranks, and then cuts the remaining groups. A message takes `message_s` each way, and an engine reads it between two
steps. A cut takes effect at the end of the step that follows.

Invariant: a server's own rules make every decision. At one time, steps end first, then the API process reads messages,
then steps begin.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from vllm_rollout.kernel.rules.launch import LaunchWindow, Turn, num_launch_places
from vllm_rollout.kernel.rules.selection import conclude
from vllm_rollout.kernel.rules.step import GroupSteps
from vllm_rollout.kernel.rules.types import GroupResult
from vllm_rollout.parts.rounds.rules.race import RacePlace
from vllm_rollout.parts.rounds.rules.round_progress import GroupEnd, RoundProgress
from vllm_rollout.parts.rounds.rules.rounds import OpenRound
from vllm_rollout.parts.rounds.rules.step import LOST, PLACE, RoundsStep
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.parts import simulated
from vllm_rollout.simulator.race import Race
from vllm_rollout.simulator.rank import Closed, Phase, Rank

ORDER: Mapping[Phase, int] = {"close": 0, "begin": 2}
API_ORDER = 1


class RoundRace:
    """Runs the groups of a round until the round is over."""

    def __init__(
        self,
        machine: Machine,
        learned: Sequence[GroupSteps],
        places: Any,
        opened: OpenRound,
        races: Sequence[Race],
        message_s: float,
    ) -> None:
        """`learned`: as of `Rank`, by rank. `places`: of all groups. `races`: by position of `opened.all_entries`."""
        self.progress = RoundProgress(opened)
        self.results: dict[int, GroupResult] = {}
        """Results of the groups that are over, by position."""
        self.rank_of: dict[int, int] = {}
        """Rank on which each group was launched, by position."""
        self._races = races
        self._position_of = {race: position for position, race in enumerate(races)}
        self._ranks = [Rank(machine, steps, f"{number}/") for number, steps in enumerate(learned)]
        self._mover = None
        if machine.moves_groups:
            num_candidates = sum(race.plan.num_candidates for race in races[: len(opened.entries)])
            self._mover = simulated("moving", "--migration").Mover(machine, self._ranks, num_candidates, message_s)
        self._next = [(inf, API_ORDER, rank) for rank in range(len(learned))]
        """(seconds, order, rank) of each rank's next event."""
        self._places = places
        num_slots = machine.num_slots
        self._window = LaunchWindow(
            sys.maxsize if num_slots is None else num_launch_places(num_slots, machine.num_ranks, 1)
        )
        self._message_s = message_s
        self._inbox: list[tuple[float, int, Closed]] = []
        """Messages to the API process: (arrival, number, report of a rank)."""
        self._numbers = count()
        self._turn: tuple[int, Turn] | None = None
        """Position and turn of the group that waits for places."""

    def run(self) -> float:
        """Run the round. Returns the seconds until the API process knows that the round is over."""
        seconds = 0.0
        self._start(seconds)
        while not self.progress.is_over:
            event = min(self._next)
            if self._inbox and (self._inbox[0][0], API_ORDER) < event[:2]:
                seconds, _, told = heappop(self._inbox)
                self._hear(seconds, told)
                continue
            rank = event[2]
            closed = self._ranks[rank].go_on()
            self._note(rank)
            if self._mover is not None:  # groups that left this rank are on their way to others
                self._note_all()
            if closed is not None and closed.num_ended:
                heappush(self._inbox, (event[0] + self._message_s, next(self._numbers), closed))
        return seconds

    @property
    def num_preemptions(self) -> int:
        return sum(rank.num_preemptions for rank in self._ranks)

    @property
    def num_moves(self) -> int:
        return 0 if self._mover is None else self._mover.num_moves

    def freed_s(self, seconds: float) -> float:
        """Seconds for which ranks were free in a round that ended at `seconds`, summed."""
        return 0 if self._mover is None else self._mover.freed_s(seconds)

    def _hear(self, seconds: float, told: Closed) -> None:
        self._window.release(told.num_ended)
        for left in told.left:
            self._places.note(left.race, left.num_tokens)
        if self._mover is not None:
            self._mover.ended(told.num_ended)
        if told.over:
            was_cut = self.progress.is_cut
            for race in told.over:
                self._places.leave(race)
                self._group_over(race)
            if self.progress.is_cut and not was_cut:
                self._cut(seconds)
        if told.over or self._turn is not None:  # else nothing has changed for groups that have not started
            self._start(seconds)
        has_begun = len(self.rank_of) >= len(self.progress.opened.entries)
        if self._mover is not None and has_begun and not self.progress.is_cut:
            self._mover.look(seconds)
            self._note_all()

    def _cut(self, seconds: float) -> None:
        """Send the cut to every rank, because no rank knows another rank's groups."""
        if len(self._ranks) == 1 or self.progress.opened.kind == "long":
            return
        for rank, its in enumerate(self._ranks):
            its.tell(seconds + self._message_s, partial(_cut, self.progress.opened.key))
            self._note(rank)

    def _group_over(self, race: Race) -> None:
        position = self._position_of[race]
        result = self.results[position] = conclude(race.plan, race.endings)
        longest = max((result.endings[index].num_tokens for index in result.selected), default=0)
        is_deferred = bool(LOST.of(race.group.parts)) or any(ending.state == "deferred" for ending in result.endings)
        self.progress.group_over(position, GroupEnd(result.status == "complete", is_deferred, longest))

    def _start(self, seconds: float) -> None:
        """Start groups, in order, as long as they have places and the round wants them."""
        while True:
            if self._turn is None:
                position = self.progress.start()
                if position is None:
                    return
                self._turn = position, self._window.ask(self._races[position].plan.num_candidates)
            position, turn = self._turn
            self._window.admit()
            if self.progress.is_cut:
                self._window.withdraw(turn)
                self.progress.withdraw(position)
            elif turn.admitted:
                self._launch(position, seconds)
            else:
                return
            self._turn = None

    def _launch(self, position: int, seconds: float) -> None:
        race, opened = self._races[position], self.progress.opened
        if opened.kind == "short":
            race.said |= PLACE.value(RacePlace(opened.key, self.progress.num_wanted, position))
        rank = self.rank_of[position] = self._places.place(race)
        self._ranks[rank].launch(race, seconds + self._message_s)
        self._note(rank)

    def _note_all(self) -> None:
        for rank in range(len(self._ranks)):
            self._note(rank)

    def _note(self, rank: int) -> None:
        happening = self._ranks[rank].next
        self._next[rank] = (
            (inf, API_ORDER, rank) if happening is None else (happening.seconds, ORDER[happening.phase], rank)
        )


def _cut(race_id: str, steps: GroupSteps) -> None:
    """Cut a race, because enough of its groups are complete elsewhere."""
    steps.part(RoundsStep).cut(race_id, steps)

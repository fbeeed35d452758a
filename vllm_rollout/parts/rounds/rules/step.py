"""Rounds in an engine's step: groups of a round race each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm_rollout.kernel.rules.detached import DetachedGroup
from vllm_rollout.kernel.rules.keys import Key
from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.step import Entered, GroupSteps, Phase, Step, StepPart
from vllm_rollout.kernel.rules.types import CandidateId, TooLate
from vllm_rollout.parts.rounds.rules.race import RacePlace, RaceTable

ROUNDS = "rounds"
PLACE: Key[RacePlace] = Key(ROUNDS)
LOST: Key[TooLate] = Key(ROUNDS)
"""The value of a group that completed after as many others as its race wanted."""

ON_THE_WIRE: Mapping[str, Any] = {"said": RacePlace, "note": TooLate, "taken": RacePlace}
"""Types of the values of this part that go from process to process."""


class RoundsStep(StepPart):
    """Races between the groups of one engine."""

    name = ROUNDS

    def __init__(self) -> None:
        self.races = RaceTable()

    def phases(self) -> Mapping[Phase, Callable[[Step], None]]:
        return {"groups": self._settle}

    def enter(self, id: CandidateId, group: Group, entered: Entered, steps: GroupSteps) -> None:
        if entered.said is not None and self.races.enter(id.group_id, group, entered.said):
            steps.cancel(id.group_id)

    def note(self, id: CandidateId, group: Group) -> TooLate | None:
        return LOST.of(group.parts)

    def take(self, group_id: str, group: Group) -> RacePlace | None:
        return self.races.leave(group_id)

    def put(self, detached: DetachedGroup, value: RacePlace, steps: GroupSteps) -> None:
        if self.races.enter(detached.group_id, detached.group, value):
            steps.cancel(detached.group_id)

    def drop(self, group_id: str) -> None:
        self.races.leave(group_id)

    def cut(self, race_id: str, steps: GroupSteps) -> None:
        """End a race, because enough groups of all engines are complete. The other groups stop as `deferred`, also
        those that arrive later."""
        for group_id in self.races.cut(race_id):
            steps.cancel(group_id)

    def _settle(self, step: Step) -> None:
        lost, too_late = self.races.settle(step.touched)
        for group_id in lost:
            step.touched[group_id].parts[ROUNDS] = TooLate()
        for group_id in too_late:
            step.cancel(group_id)

"""Races of groups in the engine core."""

from __future__ import annotations

from typing import ClassVar

from vllm.v1.engine.core import EngineCore

from vllm_rollout.kernel.core.ports import Answers, CorePart
from vllm_rollout.parts.rounds.calls import CUT_RACE, FORGET_RACE, NUM_RACES, WIDEN_RACE
from vllm_rollout.parts.rounds.rules.race import RaceTable
from vllm_rollout.parts.rounds.rules.step import RoundsStep


def _cut(core: EngineCore, race_id: str) -> None:
    steps = core.scheduler.group_steps
    steps.part(RoundsStep).cut(race_id, steps)


def _races(core: EngineCore) -> RaceTable:
    return core.scheduler.group_steps.part(RoundsStep).races


class RoundsCore(CorePart):
    answers: ClassVar[Answers] = {
        CUT_RACE: _cut,
        WIDEN_RACE: lambda core, race: _races(core).widen(race.race_id, race.num_wanted),
        NUM_RACES: lambda core, _: len(_races(core)),
        FORGET_RACE: lambda core, race_id: _races(core).forget(race_id),
    }

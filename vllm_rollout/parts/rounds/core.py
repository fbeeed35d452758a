"""Races of groups in the engine core."""

from __future__ import annotations

from typing import ClassVar

from vllm_rollout.kernel.core.ports import Answers, CorePart
from vllm_rollout.parts.rounds.calls import CUT_RACE, FORGET_RACE, WIDEN_RACE


class RoundsCore(CorePart):
    answers: ClassVar[Answers] = {
        CUT_RACE: lambda core, race_id: core.scheduler.group_steps.cut(race_id),
        WIDEN_RACE: lambda core, race: core.scheduler.group_steps.races.widen(race.race_id, race.num_wanted),
        FORGET_RACE: lambda core, race_id: core.scheduler.group_steps.races.forget(race_id),
    }

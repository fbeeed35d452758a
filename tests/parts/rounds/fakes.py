"""Races of the fake engine, and runs of its app."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI

from tests.kernel.http.fake_engine import FakeEngine, FakePart
from vllm_rollout.kernel.call_table import Operation
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.parts.rounds.calls import CUT_RACE, FORGET_RACE, NUM_RACES, WIDEN_RACE
from vllm_rollout.parts.rounds.http.service import RunService
from vllm_rollout.parts.rounds.http.store import RunStore
from vllm_rollout.parts.rounds.rules.race import RaceTable
from vllm_rollout.parts.rounds.rules.step import RoundsStep


class FakeRounds(FakePart):
    """Keeps runs in the `database` of the app, and resizes by what its `make_parallelism` makes."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self.launched_at_cuts: list[int] = []
        """Number of launched candidates at each cut of a race."""

    @property
    def races(self) -> RaceTable:
        return self.engine.steps.part(RoundsStep).races

    def begin(self, metrics: Metrics, settings: Mapping[str, Any]) -> None:
        self._metrics, self._settings = metrics, settings

    def serve(self, app: FastAPI) -> None:
        rollouts, store = app.state.rollout_service, RunStore(self._settings.get("database"))
        service = app.state.run_service = RunService(rollouts, self.engine, store, self._metrics)
        if (shaping := self.engine.parts.get("shaping")) is not None:
            service.length_history = shaping.length_history
        if (make_parallelism := self._settings.get("make_parallelism")) is not None:
            service.resize_by(make_parallelism(self._metrics))

    def answers(self) -> Mapping[Operation[Any, Any], Callable[[Any], Any]]:
        return {
            CUT_RACE: self._cut,
            WIDEN_RACE: lambda race: self.races.widen(*race),
            FORGET_RACE: self.races.forget,
            NUM_RACES: lambda _: len(self.races),
        }

    def _cut(self, race_id: str) -> None:
        self.launched_at_cuts.append(self.engine.num_launched)
        self.engine.steps.part(RoundsStep).cut(race_id, self.engine.steps)


FAKE = FakeRounds

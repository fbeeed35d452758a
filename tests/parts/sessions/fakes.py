"""Sessions of the fake engine's app, in a test's own time if it asks for the clock."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
from fastapi import FastAPI

from tests.kernel.http.fake_engine import FakePart
from vllm_rollout.kernel.call_table import GIVE_UP
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.parts import faces
from vllm_rollout.parts.rewards.http.plan import RewardsPlan
from vllm_rollout.parts.sessions.http.service import SessionService


class FakeSessions(FakePart):
    """Groups of sessions. Their turns are a test's own."""

    def begin(self, metrics: Metrics, settings: Mapping[str, Any]) -> None:
        self._metrics = metrics

    def serve(self, app: FastAPI) -> None:
        rollouts = app.state.rollout_service
        refusals = [make(rollouts) for _, make in faces("session_refusal")]
        self.service = SessionService(
            partial(self.engine.calls.tell_groups, GIVE_UP),
            rollouts.part(RewardsPlan).grading,
            rollouts.rewards,
            self._metrics,
            lambda tokens: "".join(map(chr, tokens)),
            pruning_refusal=lambda: next(filter(None, (refusal() for refusal in refusals)), None),
            observers=[each for _, make in faces("session_observers") for each in make(rollouts)],
        )
        put(app, self.service)

    def forget(self) -> None:
        self.service._groups.clear()

    async def stop(self) -> None:
        for task in self.service._tasks:
            task.cancel()


FAKE = FakeSessions


def put(app: FastAPI, service: SessionService) -> None:
    """Put the service where routes, and rounds of sessions, look for it."""
    app.state.session_service = service
    if hasattr(app.state, "run_service"):
        app.state.run_service.sessions = service


class Clock:
    """A clock that a test sets, in seconds."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(app: FastAPI, clock: Clock) -> SessionService:
    """A session service in a test's own time."""
    service: SessionService = app.state.session_service
    service._clock = clock
    return service

"""Graders of the fake engine's app."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.kernel.http.fake_engine import FakePart
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.parts.rewards.http.service import GradingService, RewardsPart


class FakeRewards(FakePart, RewardsPart):
    """Grades by the `graders` of the app."""

    grading: GradingService | None = None
    """None: there is no app."""

    def begin(self, metrics: Metrics, settings: Mapping[str, Any]) -> None:
        self.grading = GradingService(settings.get("graders"), metrics)


FAKE = FakeRewards

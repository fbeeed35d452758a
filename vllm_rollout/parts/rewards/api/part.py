"""The part in the API process: graders beside it, and time limits on disk if the flags say so."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from fastapi import FastAPI

from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.parts.rewards.api.graded_answers import AnswerGrader
from vllm_rollout.parts.rewards.api.rewards import begin_grading
from vllm_rollout.parts.rewards.grading.grader import default_num_processes
from vllm_rollout.parts.rewards.grading.kept_limits import KeptLimits
from vllm_rollout.parts.rewards.http.service import GradingService, RewardsPart

LIMITS = "time_limits.json"
"""File in the folder of --rollout-state with the time limits of test cases."""


class RewardsApi(RewardsPart):
    """Overrides: start, serve."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._client = engine.client

    async def start(self, settings: Namespace) -> None:
        grader = await begin_grading(
            dict(settings.rollout_reward),
            settings.rollout_reward_processes or max(1, default_num_processes() // self._client.num_api_processes),
            settings.rollout_reward_limits,
        )
        kept = None
        if settings.rollout_state is not None:
            try:
                kept = KeptLimits(Path(settings.rollout_state) / LIMITS, grader.limits)
            except ValueError as error:
                raise RuntimeError(f"--rollout-state: {error}") from error
        self.grading = GradingService(grader, self._client.rollout_metrics, kept)

    def serve(self, app: FastAPI) -> None:
        grader = AnswerGrader(self.grading, app.state.rollout_service.rewards, self._client.generate)
        self._client.claims = (grader.claim, *self._client.claims)

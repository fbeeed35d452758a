"""Metrics of grading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm_rollout.kernel.http.engine import Engine
from vllm_rollout.kernel.http.engine_totals import Reading
from vllm_rollout.kernel.http.metrics import MetricMaker, PartMetrics
from vllm_rollout.kernel.rules.rewards import GradeStatus
from vllm_rollout.kernel.rules.types import RankCounts
from vllm_rollout.parts.rewards.rules.time_limits import TimeLimits

GRADING_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)


class GradingMetrics(PartMetrics):
    def __init__(self, make: MetricMaker) -> None:
        self.limits: TimeLimits | None = None
        """Time limits that are learned here. None if this process grades nothing."""
        self._grades = make.counter(
            "grades", "Trajectories that the server graded, by reward and status.", reward=(), status=()
        )
        self._seconds = make.histogram(
            "grading_seconds", "Time that grading a trajectory took, by reward.", GRADING_BUCKETS_S, reward=()
        )
        self._limit = make.gauge(
            "grading_limit_seconds", "Largest time limit that the server learned from correct answers."
        )
        self._to_grade = make.gauge(
            "trajectories_to_grade", "Trajectories that running rollouts want graded, by reward.", "reward", each=True
        )

    def graded(self, reward: str, status: GradeStatus, seconds: float) -> None:
        self._grades.labels(reward, status).inc()
        self._seconds.labels(reward).observe(seconds)

    def rewards_promised(self, reward: str, num_trajectories: int) -> None:
        self._to_grade.labels(reward).set(num_trajectories)

    async def refresh(self, engine: Engine, ranks: Mapping[int, RankCounts]) -> Iterable[Reading]:
        if self.limits is not None and (longest_s := self.limits.summary().largest_s) is not None:
            self._limit.set(longest_s)
        return ()

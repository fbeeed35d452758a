"""Grades trajectories of rollouts, by the graders of this process.

Invariant: every trajectory whose rollout asked for a reward gets a `Grade`. A failure harms neither other trajectories
nor the engine.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

from vllm_rollout.background import begin
from vllm_rollout.checks import shown
from vllm_rollout.kernel.http.engine import CandidateEnd, RequestError
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.http.ports import ApiPart
from vllm_rollout.kernel.http.protocol import RewardOptions
from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.parts.rewards.grading.kept_limits import KeptLimits
from vllm_rollout.parts.rewards.grading.slots import Urgency
from vllm_rollout.parts.rewards.grading.values import Message, Trajectory, failed
from vllm_rollout.parts.rewards.http.metrics import GradingMetrics
from vllm_rollout.parts.rewards.rules.time_limits import TimeLimits

MAX_PROMISED = 16_384
"""Most trajectories that one reward may have to grade for all running rollouts. A single rollout may have more."""
RETRY_AFTER_S = 5


class Graders(Protocol):
    """Graders by name (`vllm_rollout.parts.rewards.grading.Grader`)."""

    limits: TimeLimits

    @property
    def names(self) -> Sequence[str]: ...

    async def grade(
        self, name: str, trajectory: Trajectory, *, timeout_s: float | None = None, urgency: Urgency, threshold: float
    ) -> Grade: ...


def options_of(reward: str | RewardOptions) -> RewardOptions:
    return RewardOptions(name=reward) if isinstance(reward, str) else reward


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its data, as the reward function gets them."""

    prompt: str | list[Message]
    data: Any


@dataclass(slots=True)
class Grading:
    """Grading of the trajectories of one rollout."""

    options: RewardOptions
    questions: Sequence[Question]
    """Questions by position of the prompt."""
    num_trajectories: int
    """Number of trajectories that the rollout wants."""
    service: GradingService
    max_candidates: int | None = None
    waves: set[str] = field(default_factory=set)
    """The engine's names of waves: candidates launched later because of grades."""
    is_left: bool = False
    """True if grades are not needed any more."""
    _tasks: set[asyncio.Task[Grade]] = field(default_factory=set)

    def promise(self) -> None:
        self.service.promise(self.options.name, self.num_trajectories)

    def leave(self) -> None:
        """Stop grading, because the rollout is over or its client has left."""
        self.service.promise(self.options.name, -self.num_trajectories)
        self.is_left = True
        for task in self._tasks:
            task.cancel()

    def start(self, position: int, end: CandidateEnd, urgency: Urgency) -> asyncio.Task[Grade]:
        """Start to grade an answer to the prompt at `position`. The task may be cancelled."""
        question = self.questions[position]
        trajectory = Trajectory(question.prompt, end.text or "", question.data, end.token_ids)
        return begin(self.service.grade(self.options, trajectory, urgency), self._tasks)


class RewardsPart(ApiPart):
    """The part in the API process."""

    grading: GradingService


class GradingService:
    """Passes gradings of rollouts to the graders of this process."""

    def __init__(self, graders: Graders | None, metrics: Metrics, kept: KeptLimits | None = None) -> None:
        """`graders`: None if this server grades nothing. `kept`: the file of their time limits."""
        self._kept = kept
        self._graders = graders
        self._metrics = metrics.of(GradingMetrics)
        self._metrics.limits = None if graders is None else graders.limits
        self._promised: Counter[str] = Counter()
        """Trajectories that running rollouts want, graded or not, by reward."""

    def check(self, options: RewardOptions, num_trajectories: int) -> None:
        """Raises: RequestError (400) for an unknown name, (429) while too many others are to be graded."""
        names = [] if self._graders is None else list(self._graders.names)
        if options.name not in names:
            raise RequestError(
                f"reward: must be one of {', '.join(names) or 'none, since nothing grades here'}, got "
                f"{shown(options.name)}. Start the server with --rollout-reward NAME=package.module:function.",
                param="reward",
            )
        promised = self._promised[options.name]
        if promised and promised + num_trajectories > MAX_PROMISED:
            raise RequestError(
                f"reward: {options.name} has {promised} trajectories to grade already, and may have {MAX_PROMISED}. "
                "Wait until other rollouts are over, or give it more processes (--rollout-reward-processes).",
                status=HTTPStatus.TOO_MANY_REQUESTS,
                param="reward",
                retry_after_s=RETRY_AFTER_S,
            )

    def promise(self, name: str, num_trajectories: int) -> None:
        """Add to the number of trajectories to grade. A negative number means that a rollout is over."""
        self._promised[name] += num_trajectories
        self._metrics.rewards_promised(name, self._promised[name])

    async def grade(self, options: RewardOptions, trajectory: Trajectory, urgency: Urgency) -> Grade:
        assert self._graders is not None  # `check` found it
        try:
            grade = await self._graders.grade(
                options.name,
                trajectory,
                timeout_s=options.timeout_s,
                urgency=urgency,
                threshold=options.threshold,
            )
        except Exception as error:  # whatever a grader does is its own trajectory's error
            grade = failed(f"grading failed: {type(error).__name__}: {error}")
        self._metrics.graded(options.name, grade.status, grade.seconds)
        if self._kept is not None and grade.status == "ok":
            self._kept.changed()
        return grade

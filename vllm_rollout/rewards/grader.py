"""Grades trajectories by the name of a reward, many at once, each within its time limit.

Invariant: every trajectory gets one `Grade`, whatever its function does, unless its caller is cancelled.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Self

import cloudpickle

from vllm_rollout.group.rewards.time_limits import LimitTerms, TimeLimits
from vllm_rollout.rewards.code import CodeReward
from vllm_rollout.rewards.frames import Load
from vllm_rollout.rewards.functions import RewardFunction, caller
from vllm_rollout.rewards.pool import GradingProcess, ProcessBounds
from vllm_rollout.rewards.sandbox import choose_sandbox
from vllm_rollout.rewards.slots import GraderBusy, Slots
from vllm_rollout.rewards.values import Grade, Trajectory, case_of, failed

BUILT_IN = ("exact", "regex", "math", "code")
MAX_WAITING = 16_384

__all__ = ["Grader", "GraderBusy"]


class Grader:
    """`rewards`: by name, a function, `package.module:function`, or one of `exact`, `regex`, `math` and `code`.

    Raises: ValueError for what is none of these, SandboxError when it is entered with `code` and no sandbox works.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardFunction | str],
        *,
        num_processes: int | None = None,
        limits: LimitTerms | None = None,
        bounds: ProcessBounds | None = None,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self.limits = TimeLimits(limits)
        self._sources = {name: _source(name, reward) for name, reward in rewards.items()}
        self._bounds = bounds or ProcessBounds()
        self._slots = Slots(num_processes or max(1, (os.cpu_count() or 2) // 2), max_waiting)
        self._idle: list[GradingProcess] = []
        self._code: CodeReward | None = None

    async def __aenter__(self) -> Self:
        if None in self._sources.values():
            self._code = CodeReward(await choose_sandbox(), self.limits)
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._idle:
            process.kill()
        self._idle.clear()

    @property
    def names(self) -> list[str]:
        return list(self._sources)

    async def grade(
        self, name: str, trajectory: Trajectory, *, timeout_s: float | None = None, urgency: float = 0.0
    ) -> Grade:
        """`timeout_s`: at most, however long the learned limit is. `urgency`: the highest is graded first.

        Raises: ValueError for an unknown name, GraderBusy when too many wait.
        """
        if name not in self._sources:
            raise ValueError(f"reward must be one of {', '.join(self._sources) or 'none'}, got {name!r}")
        source = self._sources[name]
        async with self._slots.one(urgency):
            try:
                if source is None:
                    assert self._code is not None, "a Grader with `code` is entered before it grades"
                    return await self._code.grade(trajectory, timeout_s)
                return await self._by_function(source, trajectory, timeout_s)
            except (TypeError, ValueError, OSError) as error:
                return failed(f"the trajectory cannot be given to its reward function: {error}")

    async def _by_function(self, function: Load, trajectory: Trajectory, timeout_s: float | None) -> Grade:
        case = case_of(trajectory)
        limit_s = min(self.limits.limit_s(case), timeout_s or self.limits.terms.longest_s)
        process = self._idle.pop() if self._idle else await GradingProcess.start(self._bounds)
        try:
            grade = await process.grade(function, trajectory, limit_s)
        finally:
            if process.is_spent:
                process.kill()
            else:
                self._idle.append(process)
        self.limits.observe(
            case, grade.seconds, is_correct=grade.status == "ok" and bool(grade.reward and grade.reward > 0)
        )
        return grade


def _source(name: str, reward: RewardFunction | str) -> Load | None:
    """What a process loads; None for `code`, which needs a sandbox instead."""
    if reward == "code":
        return None
    if isinstance(reward, str):
        place = f"vllm_rollout.rewards.builtin:{reward}" if reward in BUILT_IN else reward
        if ":" not in place:
            raise ValueError(
                f"the reward {name!r} must be {', '.join(BUILT_IN)} or package.module:function, got {reward!r}"
            )
        return Load(name, place)
    caller(reward)
    return Load(name, pickled=cloudpickle.dumps(reward))

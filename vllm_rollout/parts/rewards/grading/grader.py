"""Grades trajectories by the name of a reward, many at once, each within its time limit.

Invariant: every trajectory gets one `Grade`, whatever its reward function does, unless its caller is cancelled.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import cloudpickle
import msgspec

from vllm_rollout.checks import shown
from vllm_rollout.config import REWARD_THRESHOLD
from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.parts.rewards.grading.code import CodeReward
from vllm_rollout.parts.rewards.grading.frames import Load
from vllm_rollout.parts.rewards.grading.functions import RewardFunction, caller
from vllm_rollout.parts.rewards.grading.http import RewardServer
from vllm_rollout.parts.rewards.grading.judge import Judge
from vllm_rollout.parts.rewards.grading.pool import GradingProcesses, ProcessBounds, WatcherEnded
from vllm_rollout.parts.rewards.grading.program_tests import TestJob, TestRun
from vllm_rollout.parts.rewards.grading.sandbox import SandboxError, choose_sandbox
from vllm_rollout.parts.rewards.grading.slots import Slots, Urgency
from vllm_rollout.parts.rewards.grading.values import Trajectory, case_of, failed
from vllm_rollout.parts.rewards.rules.time_limits import LimitTerms, TimeLimits

logger = logging.getLogger(__name__)

BUILT_IN = ("exact", "regex", "math", "code")
MAX_WAITING = 16_384
NUM_REQUESTS = 64
"""Requests to one reward server, or judge, at once."""


def default_num_processes() -> int:
    """One per core, but at least four: a process that waits for a core loses no reward."""
    return max(4, os.cpu_count() or 1)


class RewardLoad(NamedTuple):
    """Number of trajectories at one reward."""

    waiting: int
    running: int


class _Reward(NamedTuple):
    slots: Slots
    grade: Callable[..., Awaitable[Grade]]
    """Takes the trajectory and its longest time in seconds. A function takes the threshold, too."""


class Grader:
    """Grades trajectories by the rewards in `rewards`, by name.

    A reward is a function, `package.module:function`, a reward server's URL, a judge or its `.toml` file, or one of
    `exact`, `regex`, `math` and `code`. A grader is an asynchronous context manager, and ends all that it started on
    exit.

    Raises: ValueError for any other reward. SandboxError on entry, if a reward is `code` and no sandbox works.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardFunction | str | Judge],
        *,
        num_processes: int | None = None,
        limits: LimitTerms | None = None,
        bounds: ProcessBounds | None = None,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self.limits = TimeLimits(limits)
        self._sources = {name: _source(name, reward) for name, reward in rewards.items()}
        self._processes = GradingProcesses(bounds or ProcessBounds())
        self._slots = Slots(num_processes or default_num_processes(), max_waiting)
        self._max_waiting = max_waiting
        self._rewards: dict[str, _Reward] = {}
        self._held = AsyncExitStack()
        self.sandbox: str | None = None
        """Name of the sandbox that runs the programs of `code`. None if no reward is `code`."""

    async def __aenter__(self) -> Self:
        self._held.push_async_callback(self._processes.close)
        for name, source in self._sources.items():
            if isinstance(source, RewardServer | Judge):
                await self._held.enter_async_context(source)
                self._rewards[name] = _Reward(Slots(NUM_REQUESTS, self._max_waiting), source.grade)
            elif source is None:
                sandbox = await choose_sandbox()
                self.sandbox = sandbox.backend.name
                logger.info("The programs that the reward %s runs are held by %s.", name, self.sandbox)
                self._rewards[name] = _Reward(
                    self._slots, CodeReward(self._run_test, self.limits, sandbox.bounds).grade
                )
            else:
                self._rewards[name] = _Reward(self._slots, partial(self._by_function, source))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._rewards.clear()
        await self._held.aclose()

    @property
    def names(self) -> list[str]:
        return list(self._sources)

    @property
    def loads(self) -> dict[str, RewardLoad]:
        """Waiting and running trajectories by the name of a reward."""
        return {
            name: RewardLoad(slots.num_waiting[name], slots.num_running[name])
            for name, (slots, _) in self._rewards.items()
        }

    async def check(self) -> None:
        """Load every function in a process, as the first trajectories would.

        Raises: ValueError for the first function that cannot be loaded, with the reason and what to do.
        """
        for name, source in self._sources.items():
            if not isinstance(source, Load):
                continue
            async with self._processes.one() as process:
                loaded = await process.load(source)
            if loaded.status != "ok":
                raise ValueError(
                    f"the reward {name!r} does not work: {loaded.reason}. Name a function that can be imported where "
                    "this runs, and install what its module imports."
                )

    async def grade(
        self,
        name: str,
        trajectory: Trajectory,
        *,
        timeout_s: float | None = None,
        urgency: float | Urgency = 0.0,
        threshold: float = REWARD_THRESHOLD,
    ) -> Grade:
        """Grade a trajectory by the reward `name`.

        `timeout_s`: the longest time for it, however long the learned limit is. `urgency`: the highest goes first. An
        `Urgency` may be hastened meanwhile. `threshold`: a reward above it is of a right answer, from whose time the
        limit is learned.

        Raises: ValueError for an unknown name. GraderBusy if too many trajectories wait.
        """
        if name not in self._rewards:
            raise ValueError(f"reward must be one of {', '.join(self._sources) or 'none'}, got {shown(name)}")
        slots, grade = self._rewards[name]
        more = {"threshold": threshold} if isinstance(self._sources[name], Load) else {}
        # No text may keep an answer from being graded: a lone half of a surrogate pair cannot be sent.
        trajectory = msgspec.structs.replace(trajectory, text=trajectory.text.encode(errors="replace").decode())
        async with slots.one(name, urgency if isinstance(urgency, Urgency) else Urgency(urgency)):
            try:
                return await grade(trajectory, timeout_s or self.limits.terms.longest_s, **more)
            except (TypeError, ValueError, RecursionError, OSError) as error:
                return failed(f"the trajectory cannot be given to what grades it: {error}")
            except SandboxError as error:
                return failed(f"the program could not be run: {error}")

    async def _run_test(self, job: TestJob) -> TestRun:
        """Run a test, and run it again if the process that watches it ended. A second end counts as the program's."""
        for _ in range(2):
            async with self._processes.one() as process:
                with suppress(WatcherEnded):
                    return await process.run_test(job)
        return TestRun("lost", False, 0.0)

    async def _by_function(
        self, function: Load, trajectory: Trajectory, longest_s: float, *, threshold: float
    ) -> Grade:
        case = case_of(trajectory, function.name.encode())
        async with self._processes.one() as process:
            grade = await process.grade(function, trajectory, min(self.limits.limit_s(case), longest_s))
        is_correct = grade.status == "ok" and (grade.reward or 0) > threshold
        self.limits.observe(case, grade.seconds, is_correct=is_correct)
        return grade


def _source(name: str, reward: RewardFunction | str | Judge) -> Load | RewardServer | Judge | None:
    """A function for a process to load, a server or a judge. None for `code`, which needs a sandbox instead."""
    if reward == "code":
        return None
    if isinstance(reward, Judge):
        return reward
    if not isinstance(reward, str):
        caller(reward)
        return Load(name, pickled=cloudpickle.dumps(reward))
    if reward.startswith(("http://", "https://")):
        return RewardServer(reward)
    if reward.endswith(".toml"):
        return Judge.read(Path(reward))
    place = f"vllm_rollout.parts.rewards.grading.builtin:{reward}" if reward in BUILT_IN else reward
    if ":" not in place:
        known = ", ".join(BUILT_IN)
        raise ValueError(
            f"the reward {name!r} must be {known}, package.module:function, a URL or a judge's .toml file, got "
            f"{shown(reward)}"
        )
    return Load(name, place)

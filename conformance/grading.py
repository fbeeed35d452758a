"""Trainers' reward functions, graded by our grader and as their trainers call them. Runs in the trainers' environments.

Invariant: both times it is the package's own function, named `package.module:function`. Only the caller differs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm_rollout.parts.rewards.grading.functions import load
from vllm_rollout.rewards import Grade, Grader, Trajectory


class Case(NamedTuple):
    place: str
    trajectory: Trajectory
    arguments: Mapping[str, Any]
    """Arguments of the trainer's call for this trajectory alone."""


def assert_same(cases: Sequence[Case]) -> str:
    """Assert that the grader agrees with a direct call in every case. Returns the counts of results, in words."""
    grades = asyncio.run(graded(cases))
    for case, grade in zip(cases, grades, strict=True):
        assert_as_called(case, grade)
    counts = Counter(grade.status if grade.reward is None else f"{grade.status} {grade.reward:.3g}" for grade in grades)
    num_functions = len({case.place for case in cases})
    came_to = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    return f"{len(cases)} gradings by {num_functions} functions as when called directly: {came_to}"


async def graded(cases: Sequence[Case]) -> list[Grade]:
    async with Grader({case.place: case.place for case in cases}) as grader:
        await grader.check()
        return await asyncio.gather(*[grader.grade(case.place, case.trajectory) for case in cases])


def assert_as_called(case: Case, grade: Grade) -> None:
    """Assert a case: a number is the reward, a dictionary counts by its `score`, None is void, raising is an error."""
    status, reward, reason = called(case)
    assert (grade.status, grade.reward) == (status, reward), (case, grade)
    assert reason in (grade.reason or ""), (case, grade)


def called(case: Case) -> tuple[str, float | None, str]:
    """Status, reward, and text that the reason must contain."""
    try:
        returned = load(case.place)(**case.arguments)
    except Exception as error:
        return "error", None, f"{type(error).__name__}: {error}"
    if isinstance(returned, list):  # TRL's, of a batch of one
        (returned,) = returned
    if returned is None:
        return "void", None, ""
    return "ok", float(returned["score"] if isinstance(returned, dict) else returned), ""

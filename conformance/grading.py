"""Reward functions of trainers as they are: by our grader, and as their trainers call them. Runs in their environment.

Invariant: it is the package's own function both times, named `package.module:function`; only who calls it differs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm_rollout.rewards import Grade, Grader, Trajectory
from vllm_rollout.rewards.functions import load


class Case(NamedTuple):
    place: str
    trajectory: Trajectory
    arguments: Mapping[str, Any]
    """With which the trainer calls the function for this trajectory alone."""


def assert_same(cases: Sequence[Case]) -> str:
    """Every case is graded as the function itself says. Returns how many came to what, in words."""
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
    """A number is its reward, verl's dictionary the one with that `score`, None is void, what raises is an error."""
    status, reward, reason = called(case)
    assert (grade.status, grade.reward) == (status, reward), (case, grade)
    assert reason in (grade.reason or ""), (case, grade)


def called(case: Case) -> tuple[str, float | None, str]:
    """Status, reward and what the reason must contain."""
    try:
        returned = load(case.place)(**case.arguments)
    except Exception as error:
        return "error", None, f"{type(error).__name__}: {error}"
    if isinstance(returned, list):  # TRL's, of a batch of one
        (returned,) = returned
    if returned is None:
        return "void", None, ""
    return "ok", float(returned["score"] if isinstance(returned, dict) else returned), ""

"""Work per candidate does not grow with the size of a group whose answers are graded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.kernel.http.test_work import assert_work_by_candidates
from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.parts.rewards.rules.time_limits import TimeLimits


class Graders:
    """They grade at once, each trajectory in a turn of its own."""

    names = ("r",)

    def __init__(self, grade: Grade | None) -> None:
        self.limits, self._grade = TimeLimits(), grade

    async def grade(self, name: str, trajectory: Any, **_: Any) -> Grade:
        await asyncio.sleep(0)
        return self._grade or Grade("ok", float(len(trajectory.token_ids) % 2))


SAME, VOID = Grade("ok", 0.0), Grade("void", None)
SHAPES: dict[str, tuple[dict[str, Any], Grade, tuple[float, float]]] = {
    # Fields, grades, and group_size and redundancy as shares of all.
    "a graded race": ({}, SAME, (0.5, 0.5)),
    "graded, none stopped": ({"early_stop": False}, SAME, (0.5, 0.5)),
    "all void": ({"early_stop": False}, VOID, (0.25, 0.25)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SHAPES)
def test_a_graded_rollout_takes_work_by_its_candidates(name):
    fields, grade, shares = SHAPES[name]
    assert_work_by_candidates({"reward": "r", **fields}, shares, graders=Graders(grade))

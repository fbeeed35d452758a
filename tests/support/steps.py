"""Steps of groups with all parts that are there, for tests."""

from __future__ import annotations

from typing import Any

from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.rules.step import GroupSteps


def group_steps(**settings: Any) -> GroupSteps:
    memories = next((make(dict(faces("memory"))) for _, make in faces("memories")), None)
    return GroupSteps([make() for _, make in faces("step")], memories=memories, **settings)

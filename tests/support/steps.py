"""Steps of groups with all parts that are there, for tests."""

from __future__ import annotations

from typing import Any

from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.rules.memories import Memories
from vllm_rollout.kernel.rules.step import GroupSteps


def new_memories() -> Memories:
    """Memories with a section of each part that learns."""
    return Memories(dict(faces("memory")))


def group_steps(**settings: Any) -> GroupSteps:
    return GroupSteps([make() for _, make in faces("step")], memories=new_memories(), **settings)

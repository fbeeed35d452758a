"""Groups that race each other, for tests."""

from __future__ import annotations

from typing import Any

from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.parts.rounds.rules.race import RaceTable
from vllm_rollout.parts.rounds.rules.step import LOST, RoundsStep


def races_of(of: Any) -> RaceTable:
    """The races of a scheduler, or of its steps."""
    return getattr(of, "group_steps", of).part(RoundsStep).races


def is_lost(group: Group) -> bool:
    """True if it completed after as many groups as its race wanted."""
    return bool(LOST.of(group.parts))

"""Calls to an engine core about lengths and times of steps (`kernel/call_table.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_rollout.kernel.call_table import Operation
from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.parts.shaping.rules.cost import CostModel, StepTime
from vllm_rollout.parts.shaping.rules.drift import StepDrift
from vllm_rollout.parts.shaping.rules.history import ObservedLength
from vllm_rollout.parts.shaping.rules.moments import LengthStatistics


class ObservedGroup(NamedTuple):
    """Lengths of a group that has ended."""

    key: str
    lengths: list[ObservedLength]
    adapter: str = BASE_MODEL


class LengthsToLookUp(NamedTuple):
    """Prompts, by the keys of their lengths."""

    keys: list[str]
    adapter: str = BASE_MODEL


@dataclass(frozen=True, slots=True)
class CostToCompare:
    """A profile with which real steps are compared."""

    cost: CostModel
    model: str
    profile: str
    """Path of the profile. This and the other fields are for the warning."""
    batch_sizes: Sequence[int]


# -- lengths
OBSERVE_LENGTHS: Operation[ObservedGroup, None] = Operation("observe_lengths", ObservedGroup, None)
LENGTH_HISTORY: Operation[LengthsToLookUp, LengthStatistics] = Operation(
    "length_history", LengthsToLookUp, LengthStatistics
)
# -- times of steps
RECORD_STEPS: Operation[bool, None] = Operation("record_steps", bool, None)
TAKE_STEPS: Operation[None, list[StepTime]] = Operation("take_steps", None, list[StepTime])
SET_COST_MODEL: Operation[CostToCompare | None, None] = Operation("set_cost_model", CostToCompare | None, None)
STEP_DRIFT: Operation[None, list[StepDrift]] = Operation("step_drift", None, list[StepDrift])

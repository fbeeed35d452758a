"""What a replay runs on: engines that are all alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from vllm_rollout.config import MAX_GROUP_SIZE
from vllm_rollout.group.lengths.cost import CostModel, PTLCurve
from vllm_rollout.group.plans.fields import Migration
from vllm_rollout.group.ranks.load import TransferCost

SIMULATED_BLOCK_TOKENS = 16
"""KV block whose prompt tokens siblings share in a simulation: vLLM's default on GPUs."""

IDEAL_COST = CostModel(((0.0, PTLCurve((1.0,), (1.0,))),))
"""Every step takes one unit of time, whatever is in it."""


ScaleDown = Literal["off", "auto"]


@dataclass(frozen=True, slots=True)
class Machine:
    cost: CostModel | None = None
    """None: an ideal machine, whose times are in steps."""
    num_ranks: int = 1
    """Data-parallel engines; a group stays on one of them."""
    max_num_seqs: int | None = None
    """Candidates that run at once on one rank; the others wait. Default: what was profiled, else no limit."""
    kv_capacity_tokens: int | None = None
    """Tokens that one rank's KV cache holds. None: it is never full."""
    block_size: int = SIMULATED_BLOCK_TOKENS
    migration: Migration = "off"
    """Whether groups move between ranks, and what for."""
    scale_down: ScaleDown = "off"
    """Whether half of the ranks are freed as soon as the others have room for the rest of the rollout."""
    transfer: TransferCost | None = None
    """Of KV that comes along with a group; None: its target computes it again."""

    def __post_init__(self) -> None:
        for name in ("num_ranks", "max_num_seqs", "kv_capacity_tokens", "block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def is_ideal(self) -> bool:
        return self.cost is None

    @property
    def moves_groups(self) -> bool:
        return self.num_ranks > 1 and (self.migration, self.scale_down) != ("off", "off")

    @property
    def without_moves(self) -> Machine:
        return replace(self, migration="off", scale_down="off")

    @property
    def step_cost(self) -> CostModel:
        return IDEAL_COST if self.cost is None else self.cost

    @property
    def num_slots(self) -> int | None:
        if self.max_num_seqs is not None or self.cost is None:
            return self.max_num_seqs
        return self.cost.max_num_seqs

    @property
    def max_candidates(self) -> int:
        """Of one group, all of which have to be able to run at once."""
        return MAX_GROUP_SIZE if self.num_slots is None else self.num_slots

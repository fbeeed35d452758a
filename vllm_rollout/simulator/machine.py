"""What a replay runs on, engines that are all alike, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vllm_rollout.config import MAX_GROUP_SIZE
from vllm_rollout.emulation.settings import DraftSettings
from vllm_rollout.group.lengths.cost import CostModel, PTLCurve
from vllm_rollout.group.plans.fields import Migration
from vllm_rollout.group.ranks.load import TransferCost
from vllm_rollout.group.ranks.placement import Placement
from vllm_rollout.group.ranks.work import TokenCost

SIMULATED_BLOCK_TOKENS = 16
"""KV block whose prompt tokens siblings share in a simulation: vLLM's default on GPUs."""

IDEAL_COST = CostModel(((0.0, PTLCurve((1.0,), (1.0,))),))
"""Every step takes one unit of time, whatever is in it."""

Curve = list[tuple[float, int]]
"""(time, candidates that run from then on)."""
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
    """The cost of KV that comes along with a group; None: its target computes it again."""
    drafts: DraftSettings | None = None
    """What answers of a prompt draft for each other; None: they do not."""

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

    def with_drafts(self, drafts: bool) -> Machine:
        """This machine where that is said of a setting; drafts are as measured where nothing else is known."""
        return replace(self, drafts=(self.drafts or DraftSettings()) if drafts else None)

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
    def known_cost(self) -> CostModel | None:
        """What a server on it knows of its steps, and of how many candidates run at once."""
        return None if self.cost is None else replace(self.cost, max_num_seqs=self.num_slots)

    @property
    def max_candidates(self) -> int:
        """The candidates of one group at most: all of them have to be able to run at once."""
        return MAX_GROUP_SIZE if self.num_slots is None else self.num_slots

    def new_placement(self) -> Placement:
        """As a server has it that knows what its steps cost; on an ideal machine all tokens weigh the same."""
        placement = Placement(self.num_ranks)
        if (cost := self.known_cost) is not None:
            placement.token_cost = TokenCost.of(cost)
        return placement

    def check_fits(self, prompt_id: str, num_tokens: int) -> None:
        """Raises: ValueError for a candidate that one rank's KV cache cannot hold."""
        capacity = self.kv_capacity_tokens
        if capacity is not None and num_tokens > capacity:
            raise ValueError(
                f"a candidate of prompt {prompt_id!r} needs {num_tokens:,} tokens of KV cache, but one rank has "
                f"{capacity:,}. Give it more with --kv-capacity-tokens."
            )

    def described(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "time_unit": "steps" if self.is_ideal else "seconds",
            "num_ranks": self.num_ranks,
            "max_num_seqs": self.num_slots,
            "kv_capacity_tokens": self.kv_capacity_tokens,
            "migration": self.migration,
            "scale_down": self.scale_down,
        }


@dataclass(slots=True)
class RankRun:
    """What became of a rank's part of a rollout."""

    seconds: float = 0.0
    curve: Curve = field(default_factory=list)
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class FleetRun:
    """What became of a rollout."""

    ranks: Sequence[RankRun]
    num_moves: int = 0
    freed_rank_s: float = 0.0
    """Seconds for which ranks that were emptied stayed so until the rollout was over, summed."""

    @property
    def seconds(self) -> float:
        return max(rank.seconds for rank in self.ranks)


def duration(value: float, in_steps: bool) -> str:
    if in_steps:
        return f"{value:,.0f} steps"
    return f"{value:,.0f} s" if value >= 100 else f"{value:.1f} s" if value >= 1 else f"{value * 1000:.0f} ms"

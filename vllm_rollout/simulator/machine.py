"""The simulated engines of a replay, all alike, and the outcome of a run on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vllm_rollout.config import MAX_GROUP_SIZE
from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve
from vllm_rollout.simulator.parts import simulated

SIMULATED_BLOCK_TOKENS = 16
"""Tokens of a KV block in a simulation: vLLM's default on GPUs. Siblings share full blocks of their prompt."""

IDEAL_COST = CostModel(((0.0, PTLCurve((1.0,), (1.0,))),))
"""Every step takes one unit of time, whatever is in it."""

Curve = list[tuple[float, int]]
"""(time, number of candidates that run from then on)."""
Migration = Literal["off", "spread", "consolidate", "auto"]
ScaleDown = Literal["off", "auto"]


@dataclass(frozen=True, slots=True)
class Machine:
    cost: CostModel | None = None
    """None: an ideal machine, whose times are in steps."""
    num_ranks: int = 1
    """Data-parallel engines. A group is on one of them at a time."""
    max_num_seqs: int | None = None
    """Candidates that run at once on one rank. The others wait. Default: the profiled number, else no limit."""
    kv_capacity_tokens: int | None = None
    """Tokens that one rank's KV cache holds. None: it is never full."""
    block_size: int = SIMULATED_BLOCK_TOKENS
    migration: Migration = "off"
    """Purpose for which groups move between ranks, or "off"."""
    scale_down: ScaleDown = "off"
    """With "auto", half of the ranks are freed as soon as the others have room for the rest of the rollout."""
    transfer: Any = None
    """Cost of moving KV with a group, as the part says it. None: the target computes it again."""
    drafts: Any = None
    """Acceptance of drafts between answers to a prompt, as the part says it. None: no drafts."""

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
        """This machine with or without drafts. They are accepted as measured if the machine says nothing."""
        if drafts and self.drafts is None:
            return replace(self, drafts=simulated("drafts", "drafts=true").as_measured())
        return self if drafts else replace(self, drafts=None)

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
        """Step costs, and the number of candidates that run at once, as a server on this machine knows them."""
        return None if self.cost is None else replace(self.cost, max_num_seqs=self.num_slots)

    @property
    def max_candidates(self) -> int:
        """Largest number of candidates of one group: all of them must be able to run at once."""
        return MAX_GROUP_SIZE if self.num_slots is None else self.num_slots

    def new_places(self) -> Any:
        """The places of groups, none of which is taken."""
        return OneRank() if self.num_ranks == 1 else simulated("moving", "--data-parallel-size").Places(self)

    def check_fits(self, prompt_id: str, num_tokens: int) -> None:
        """Check that one rank's KV cache can hold a candidate of `num_tokens`. Raises: ValueError."""
        capacity = self.kv_capacity_tokens
        if capacity is not None and num_tokens > capacity:
            raise ValueError(
                f"a candidate of prompt {prompt_id!r} needs {num_tokens:,} tokens of KV cache, but one rank has "
                f"{capacity:,}. Give it more with --kv-capacity-tokens."
            )

    def described(self) -> dict[str, Any]:
        """The machine as JSON-able values."""
        return {
            "time_unit": "steps" if self.is_ideal else "seconds",
            "num_ranks": self.num_ranks,
            "max_num_seqs": self.num_slots,
            "kv_capacity_tokens": self.kv_capacity_tokens,
            "migration": self.migration,
            "scale_down": self.scale_down,
        }


class OneRank:
    """The places of groups on the only rank."""

    num_ranks = 1

    def place(self, race: Any) -> int:
        """Rank on which this group starts."""
        return 0

    def note(self, race: Any, num_tokens: Sequence[int]) -> None:
        """The tokens that each running candidate of this group has by now."""

    def leave(self, race: Any) -> None:
        """This group is over."""


@dataclass(slots=True)
class RankRun:
    """Outcome of a rank's part of a rollout."""

    seconds: float = 0.0
    curve: Curve = field(default_factory=list)
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class FleetRun:
    """Outcome of a rollout."""

    ranks: Sequence[RankRun]
    num_moves: int = 0
    freed_rank_s: float = 0.0
    """Seconds from each freed rank's last step to the end of the rollout, summed."""

    @property
    def seconds(self) -> float:
        return max(rank.seconds for rank in self.ranks)


def duration(value: float, in_steps: bool) -> str:
    if in_steps:
        return f"{value:,.0f} steps"
    return f"{value:,.0f} s" if value >= 100 else f"{value:.1f} s" if value >= 1 else f"{value * 1000:.0f} ms"

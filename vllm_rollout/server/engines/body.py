"""Bodies and answers of the endpoints about ranks (docs/reference/http.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, StrictFloat

from vllm_rollout.group.ranks.load import EngineLoad
from vllm_rollout.group.ranks.scaling import ScaleReason
from vllm_rollout.server.body import Body

DEFAULT_DRAIN_S = 30.0
MAX_DRAIN_S = 3600.0

EngineState = Literal["active", "draining", "drained", "dead"]
"""
active    groups are sent to it
draining  nothing new is sent to it, and something still runs or waits there
drained   nothing new is sent to it, and nothing is there
dead      its process has ended; its numbers are not known any more
"""


class DrainRequest(Body):
    """How to empty a rank."""

    timeout_s: Annotated[StrictFloat, Field(ge=0, le=MAX_DRAIN_S)] = Field(
        default=DEFAULT_DRAIN_S,
        description="Time that the answer waits for the rank to be empty, in seconds. Requests outside of groups, "
        f"and groups that cannot move, run to their end there. From 0 to {MAX_DRAIN_S:g}.",
    )


class EngineAnswer(BaseModel):
    """One data-parallel rank."""

    rank: int
    state: EngineState
    num_running: int
    """Requests; the same:"""
    num_waiting: int
    num_groups: int
    kv_cache_usage: float
    """From 0 to 1."""
    num_preemptions: int
    """Since the server started, and so are:"""
    num_moved_in: int
    """Groups that came from other ranks."""
    num_moved_out: int
    moving_s: float
    """Seconds that the rank spent on groups that leave and come, between two steps."""
    num_moved_in_with_kv: int
    """Groups that brought KV blocks along."""
    num_kv_blocks_in: int
    """Those that were taken over."""
    num_kv_fallbacks: int
    """Groups whose KV blocks could not be sent or taken over: they were computed again."""
    kv_seconds_per_token: float | None
    """What taking over costs, moving average; null where no KV comes along."""
    num_internal_errors: int
    """Exceptions in our own code since the rank started: candidates or groups failed of them, others went on."""
    num_weight_changes: int
    """How often new weights have come since the rank started."""
    weight_version: str
    """The name of the newest, or their number where nobody has named them."""

    @classmethod
    def of(cls, rank: int, load: EngineLoad) -> EngineAnswer:
        return cls(
            rank=rank,
            state="dead" if load.is_dead else state_of(load.is_held, load.num_running + load.num_waiting),
            num_groups=len(load.groups),
            num_moved_in_with_kv=load.kv.num_groups,
            num_kv_blocks_in=load.kv.num_blocks,
            num_kv_fallbacks=load.kv.num_fallbacks,
            kv_seconds_per_token=None if load.kv.transfer is None else load.kv.transfer.s_per_token,
            **load._asdict(),
        )


class EnginesAnswer(BaseModel):
    object: Literal["list"] = "list"
    engines: list[EngineAnswer]
    """By rank."""


class ScaleDownAdvice(BaseModel):
    """Whether to free half of the ranks now (RollPacker 4.4)."""

    reason: ScaleReason
    told: str
    """With its numbers."""
    ranks: list[int]
    """To be drained; empty unless the reason is `free`."""


class AdviceAnswer(BaseModel):
    object: Literal["engines.advice"] = "engines.advice"
    num_responses: int
    """Candidates of the rollouts on their way."""
    num_complete: int
    """How many of those are complete."""
    scale_down: ScaleDownAdvice


class DrainAnswer(BaseModel):
    rank: int
    state: EngineState
    num_moved: int
    """Groups that go on elsewhere."""
    num_left: int
    """Requests that still run or wait on the rank."""
    reasons: dict[str, int]
    """Why groups stayed: how many for which."""
    seconds: float


def state_of(is_held: bool, num_requests: int) -> EngineState:
    if not is_held:
        return "active"
    return "draining" if num_requests else "drained"

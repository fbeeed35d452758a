"""Bodies and answers of the endpoints about ranks (docs/reference/http.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, StrictFloat

from vllm_rollout.kernel.http.body import Body
from vllm_rollout.parts.moving.rules.load import RankState
from vllm_rollout.parts.moving.rules.scaling import ScaleReason

DEFAULT_DRAIN_S = 30.0
MAX_DRAIN_S = 3600.0

EngineState = Literal["active", "draining", "drained", "dead"]
"""State of a rank.

active    groups are sent to it
draining  nothing new is sent to it, and requests still run or wait on it
drained   nothing new is sent to it, and it is empty
dead      its process has ended, and its numbers are unknown
"""


class DrainRequest(Body):
    """Empty a rank."""

    timeout_s: Annotated[StrictFloat, Field(ge=0, le=MAX_DRAIN_S)] = Field(
        default=DEFAULT_DRAIN_S,
        description="Time that the answer waits for the rank to be empty, in seconds. Requests outside of groups, "
        f"and groups that cannot move, run to their end there. From 0 to {MAX_DRAIN_S:g}.",
    )


class EngineAnswer(BaseModel):
    """One data-parallel rank and its load."""

    rank: int
    state: EngineState
    num_running: int
    """Running requests."""
    num_waiting: int
    num_groups: int
    kv_cache_usage: float
    """Used share of the KV cache, from 0 to 1."""
    num_preemptions: int
    """Preemptions since the server started."""
    num_moved_in: int
    """Groups that came from other ranks since the server started."""
    num_moved_out: int
    moving_s: float
    """Seconds between steps that the rank has spent on groups that leave and come, since the server started."""
    num_moved_in_with_kv: int
    """Groups that brought KV blocks along."""
    num_kv_blocks_in: int
    """KV blocks taken over from other ranks."""
    num_kv_fallbacks: int
    """Groups whose KV blocks could not be sent or taken over, and were computed again."""
    kv_seconds_per_token: float | None
    """Seconds of taking over KV, per token, moving average. Null if KV is not moved."""
    num_internal_errors: int
    """Exceptions in our own code since the rank started. Candidates or groups failed of them, others went on."""
    num_weight_changes: int
    """Weights updates since the rank started."""
    weight_version: str
    """Name of the newest weights. If they have no name, the number of weights updates."""

    @classmethod
    def of(cls, rank: int, its: RankState) -> EngineAnswer:
        return cls(
            rank=rank,
            state="dead" if its.is_dead else state_of(its.is_held, its.num_requests),
            num_groups=len(its.load.groups),
            num_moved_in=its.num_moved_in,
            num_moved_out=its.num_moved_out,
            moving_s=its.moving_s,
            num_moved_in_with_kv=its.kv.num_groups,
            num_kv_blocks_in=its.kv.num_blocks,
            num_kv_fallbacks=its.kv.num_fallbacks,
            kv_seconds_per_token=None if its.kv.transfer is None else its.kv.transfer.s_per_token,
            **its.load._asdict(),
        )


class EnginesAnswer(BaseModel):
    object: Literal["list"] = "list"
    engines: list[EngineAnswer]
    """All ranks, in order."""


class ScaleDownAdvice(BaseModel):
    """Advice on whether to free half of the ranks now (RollPacker 4.4)."""

    reason: ScaleReason
    told: str
    """The reason in words, with its numbers."""
    ranks: list[int]
    """Ranks to drain. Empty unless `reason` is `free`."""


class AdviceAnswer(BaseModel):
    object: Literal["engines.advice"] = "engines.advice"
    num_responses: int
    """Candidates of all running rollouts."""
    num_complete: int
    """Candidates of them that are complete."""
    scale_down: ScaleDownAdvice


class DrainAnswer(BaseModel):
    rank: int
    state: EngineState
    num_moved: int
    """Groups that moved to other ranks."""
    num_left: int
    """Requests that still run or wait on the rank."""
    reasons: dict[str, int]
    """Reasons why groups stayed -> number of groups."""
    seconds: float


def state_of(is_held: bool, num_requests: int) -> EngineState:
    if not is_held:
        return "active"
    return "draining" if num_requests else "drained"

"""Calls about data-parallel ranks. Invariant: as in `kernel/client/calls.py`."""

from __future__ import annotations

from vllm_rollout.kernel.client.blocking import Blocked, blocking
from vllm_rollout.kernel.client.calls import Call, typed
from vllm_rollout.kernel.client.methods import ClientPart, awaited
from vllm_rollout.kernel.client.sender import Sender
from vllm_rollout.parts.moving.http.body import (
    DEFAULT_DRAIN_S,
    AdviceAnswer,
    DrainAnswer,
    EngineAnswer,
    EnginesAnswer,
)


def engines() -> Call[list[EngineAnswer]]:
    """State and load of each rank."""
    return Call("GET", "/v1/engines", lambda response: typed(EnginesAnswer)(response).engines)


def engines_advice() -> Call[AdviceAnswer]:
    """Advice whether half of the ranks could be freed now."""
    return Call("GET", "/v1/engines/advice", typed(AdviceAnswer))


def drain(rank: int, timeout_s: float = DEFAULT_DRAIN_S) -> Call[DrainAnswer]:
    """Move all groups of a rank to other ranks, and keep the rank empty until `restore`. Safe to repeat.

    `timeout_s`: longest wait in seconds for groups that cannot move. Raises: RolloutError, 409 for the last rank.
    """
    body = {"timeout_s": float(timeout_s)}
    return Call("POST", f"/v1/engines/{rank}/drain", typed(DrainAnswer), body, timeout=timeout_s + 60)


def restore(rank: int) -> Call[EngineAnswer]:
    """Let a drained rank take groups again. Safe to repeat."""
    return Call("POST", f"/v1/engines/{rank}/restore", typed(EngineAnswer))


class AsyncRankCalls(Sender):
    """Methods of the async client."""

    engines = awaited(engines)
    engines_advice = awaited(engines_advice)
    drain = awaited(drain)
    restore = awaited(restore)


class RankCalls(Blocked):
    """Methods of the sync client."""

    engines = blocking(AsyncRankCalls.engines)
    engines_advice = blocking(AsyncRankCalls.engines_advice)
    drain = blocking(AsyncRankCalls.drain)
    restore = blocking(AsyncRankCalls.restore)


CLIENT = ClientPart(AsyncRankCalls, RankCalls)

"""What a server can be asked about its ranks. Invariant: as of `calls.py`."""

from __future__ import annotations

from vllm_rollout.client.calls import Call, typed
from vllm_rollout.server.engines.body import (
    DEFAULT_DRAIN_S,
    AdviceAnswer,
    DrainAnswer,
    EngineAnswer,
    EnginesAnswer,
)

_read_engines = typed(EnginesAnswer)
_read_engine = typed(EngineAnswer)
_read_drained = typed(DrainAnswer)
_read_advice = typed(AdviceAnswer)


def engines() -> Call[list[EngineAnswer]]:
    """Each rank and its load."""
    return Call("GET", "/v1/engines", lambda response: _read_engines(response).engines)


def engines_advice() -> Call[AdviceAnswer]:
    """Whether half of the ranks could be freed now."""
    return Call("GET", "/v1/engines/advice", _read_advice)


def drain(rank: int, timeout_s: float = DEFAULT_DRAIN_S) -> Call[DrainAnswer]:
    """Move all groups of a rank elsewhere, and keep it empty until `restore`. Safe to repeat.

    `timeout_s`: so long the answer waits for what cannot move. Raises: RolloutError, 409 for the last rank.
    """
    body = {"timeout_s": float(timeout_s)}
    return Call("POST", f"/v1/engines/{rank}/drain", _read_drained, body, timeout=timeout_s + 60)


def restore(rank: int) -> Call[EngineAnswer]:
    """Groups are sent to this rank again. Safe to repeat."""
    return Call("POST", f"/v1/engines/{rank}/restore", _read_engine)

"""Settings of moves for the processes of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_rollout.adapter.options import Options


@dataclass(frozen=True, slots=True)
class MovingOptions(Options):
    """Values of the flags of moving."""

    PART = "moving"

    moves_kv: bool = True
    """True if a group that moves takes its KV blocks along."""
    moves_kv_by_nixl: bool = False
    """True if it takes them to other hosts too."""

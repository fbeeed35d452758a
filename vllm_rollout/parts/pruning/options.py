"""Settings of pruning for the processes of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_rollout.adapter.options import Options


@dataclass(frozen=True, slots=True)
class PruningOptions(Options):
    """Values of the flags of pruning."""

    PART = "pruning"

    train_budget_s: float = 0.004
    """Seconds of training between two engine steps: as many optimizer steps as fit, and at least one."""
    feature_ring_bytes: int = 256 * 2**20
    """Bytes of host memory for hidden states that wait for rewards: 32,768 candidates at hidden size 4,096 in bfloat16.
    """

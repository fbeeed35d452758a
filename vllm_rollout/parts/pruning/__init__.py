"""Stops candidates by scores, learns from rewards, and votes (ARRoL)."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "pruning",
    "Stops candidates by scores, learns from rewards, and votes (ARRoL).",
    also={"emulation": {"emulated": "vllm_rollout.parts.pruning.worker.emulated:emulated_heads"}},
)

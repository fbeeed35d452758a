"""Stops candidates by scores, learns from rewards, and votes (ARRoL)."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "pruning",
    "Stops candidates by scores, learns from rewards, and votes (ARRoL).",
    faces={
        "simulated": "vllm_rollout.parts.pruning.simulated",
        "step": "vllm_rollout.parts.pruning.rules.step:PruningStep",
        "wire": "vllm_rollout.parts.pruning.rules.step:ON_THE_WIRE",
    },
    also={"emulation": {"emulated": "vllm_rollout.parts.pruning.worker.emulated:emulated_heads"}},
)

"""Stops candidates by scores, learns from rewards, and votes (ARRoL)."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "pruning",
    "Stops candidates by scores, learns from rewards, and votes (ARRoL).",
    faces={
        "flags": "vllm_rollout.parts.pruning.api.flags:FLAGS",
        "step": "vllm_rollout.parts.pruning.rules.step:PruningStep",
        "wire": "vllm_rollout.parts.pruning.rules.step:ON_THE_WIRE",
    },
)

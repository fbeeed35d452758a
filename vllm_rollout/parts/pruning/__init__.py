"""Stops candidates by scores, learns from rewards, and votes (ARRoL)."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "pruning",
    "Stops candidates by scores, learns from rewards, and votes (ARRoL).",
    faces={"client": "vllm_rollout.parts.pruning.client:CLIENT"},
    exports={
        "Pruning": "vllm_rollout.kernel.http.protocol:Pruning",
        "QualityHead": "vllm_rollout.parts.pruning.client:QualityHead",
    },
)

"""Keeps what other parts learn, for each served name."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "memories",
    "Keeps what other parts learn, for each served name.",
    is_base=True,
    faces={"memories": "vllm_rollout.parts.memories.rules:Memories"},
)

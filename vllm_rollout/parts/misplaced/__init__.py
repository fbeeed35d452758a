"""Refuses our fields where vLLM's endpoints would ignore them."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "misplaced",
    "Refuses our fields where vLLM's endpoints would ignore them.",
    faces={"app": "vllm_rollout.parts.misplaced.http:refuse_misplaced"},
)

"""Knows the lengths of answers and their cost, and chooses the number and order of candidates by them (DARTS)."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "shaping",
    "Knows the lengths of answers and their cost, and chooses the number and order of candidates by them (DARTS).",
    needs=("memories",),
    faces={
        "api": "vllm_rollout.parts.shaping.api.lengths:part",
        "core": "vllm_rollout.parts.shaping.core:ShapingCore",
        "flags": "vllm_rollout.parts.shaping.api.flags:FLAGS",
        "memory": "vllm_rollout.parts.shaping.rules.history:LengthHistory",
        "metrics": "vllm_rollout.parts.shaping.http.metrics:ShapingMetrics",
        "plan": "vllm_rollout.parts.shaping.http.service:ShapingPlan",
    },
)

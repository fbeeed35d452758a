"""Grades answers while rollouts run."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "rewards",
    "Grades answers while rollouts run.",
    faces={"doctor": "vllm_rollout.parts.rewards.doctor:check_sandbox"},
)

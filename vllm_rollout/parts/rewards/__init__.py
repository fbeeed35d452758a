"""Grades answers while rollouts run."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "rewards",
    "Grades answers while rollouts run.",
    faces={"metrics": "vllm_rollout.parts.rewards.http.metrics:GradingMetrics"},
)

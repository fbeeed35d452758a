"""Grades answers while rollouts run."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "rewards",
    "Grades answers while rollouts run.",
    faces={
        "api": "vllm_rollout.parts.rewards.api.part:RewardsApi",
        "doctor": "vllm_rollout.parts.rewards.doctor:check_sandbox",
        "flags": "vllm_rollout.parts.rewards.api.flags:FLAGS",
        "metrics": "vllm_rollout.parts.rewards.http.metrics:GradingMetrics",
        "plan": "vllm_rollout.parts.rewards.http.plan:RewardsPlan",
    },
)

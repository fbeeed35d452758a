"""Tail batching: runs of short and long rounds (RollPacker)."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "rounds",
    "Tail batching: runs of short and long rounds (RollPacker).",
    faces={
        "metrics": "vllm_rollout.parts.rounds.http.metrics:RoundMetrics",
        "routes": "vllm_rollout.parts.rounds.http.routes:ROUTES",
        "step": "vllm_rollout.parts.rounds.rules.step:RoundsStep",
        "wire": "vllm_rollout.parts.rounds.rules.step:ON_THE_WIRE",
    },
    also={"moving": {"metrics": "vllm_rollout.parts.rounds.http.metrics:ParallelismMetrics"}},
)

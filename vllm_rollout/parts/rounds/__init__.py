"""Tail batching: runs of short and long rounds (RollPacker)."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "rounds",
    "Tail batching: runs of short and long rounds (RollPacker).",
    faces={
        "demo": "vllm_rollout.parts.rounds.demo.run:demo",
        "simulated": "vllm_rollout.parts.rounds.simulated.job:job",
        "step": "vllm_rollout.parts.rounds.rules.step:RoundsStep",
        "wire": "vllm_rollout.parts.rounds.rules.step:ON_THE_WIRE",
    },
)

"""Tail batching: runs of short and long rounds (RollPacker)."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "rounds",
    "Tail batching: runs of short and long rounds (RollPacker).",
    faces={
        "step": "vllm_rollout.parts.rounds.rules.step:RoundsStep",
        "wire": "vllm_rollout.parts.rounds.rules.step:ON_THE_WIRE",
    },
)

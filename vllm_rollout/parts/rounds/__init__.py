"""Tail batching: runs of short and long rounds (RollPacker)."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "rounds",
    "Tail batching: runs of short and long rounds (RollPacker).",
    faces={"client": "vllm_rollout.parts.rounds.client.methods:CLIENT"},
    exports={
        "AgentRound": "vllm_rollout.parts.rounds.client.agent_rounds:AgentRound",
        "AsyncRun": "vllm_rollout.parts.rounds.client.run:AsyncRun",
        "Run": "vllm_rollout.parts.rounds.client.run:Run",
    },
)

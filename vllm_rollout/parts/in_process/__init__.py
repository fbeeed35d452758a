"""Races groups in a trainer's own process, without a server."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "in_process",
    "Races groups in a trainer's own process, without a server.",
    faces={
        "plugin": "vllm_rollout.parts.in_process.plugin:take_engines",
    },
)

"""Serves the endpoints of trainers' own servers."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "trainers",
    "Serves the endpoints of trainers' own servers.",
    needs=("sessions",),
    faces={
        "app": "vllm_rollout.parts.trainers.api.trainers:attach_compat",
        "flags": "vllm_rollout.parts.trainers.api.trainers:FLAGS",
    },
)

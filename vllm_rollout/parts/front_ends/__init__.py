"""Runs vLLM's Rust front end beside ours."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "front_ends",
    "Runs vLLM's Rust front end beside ours.",
    faces={
        "flags": "vllm_rollout.parts.front_ends.api:FLAGS",
    },
)

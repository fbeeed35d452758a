"""Runs several API processes as one server, and vLLM's Rust front end beside ours."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "front_ends",
    "Runs several API processes as one server, and vLLM's Rust front end beside ours.",
    faces={
        "api": "vllm_rollout.parts.front_ends.api.part:FrontEndsApi",
        "flags": "vllm_rollout.parts.front_ends.api.rust:FLAGS",
        "processes": "vllm_rollout.parts.front_ends.api.part:FrontEndsApi",
    },
)

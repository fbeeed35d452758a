"""Takes rewards that clients post."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "posted",
    "Takes rewards that clients post.",
    faces={
        "client": "vllm_rollout.parts.posted.client:CLIENT",
        "routes": "vllm_rollout.parts.posted.http:ROUTES",
    },
)

"""Shows and records rollouts: the page, recordings, receipts and traces."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "page",
    "Shows and records rollouts: the page, recordings, receipts and traces.",
    needs=("shaping",),
    faces={
        "commands": "vllm_rollout.parts.page.watching.command",
        "simulated": "vllm_rollout.parts.page.simulated:Recording",
        "traces": "vllm_rollout.parts.page.recording.file",
    },
)

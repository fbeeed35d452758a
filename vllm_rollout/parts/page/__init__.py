"""Shows and records rollouts: the page, recordings, receipts and traces."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "page",
    "Shows and records rollouts: the page, recordings, receipts and traces.",
    needs=("shaping",),
    faces={
        "api": "vllm_rollout.parts.page.http.part:PagePart",
        "commands": "vllm_rollout.parts.page.watching.command",
        "core": "vllm_rollout.parts.page.core:PageCore",
        "first": "vllm_rollout.parts.page.http.routes:OF_FIRST",
        "flags": "vllm_rollout.parts.page.api:FLAGS",
        "plan": "vllm_rollout.parts.page.http.plan:PagePlan",
        "routes": "vllm_rollout.parts.page.http.routes:ROUTES",
        "simulated": "vllm_rollout.parts.page.simulated:Recording",
        "traces": "vllm_rollout.parts.page.recording.file",
    },
    also={"moving": {"ranks": "vllm_rollout.parts.page.with_moving.http:ranks"}},
)

"""Uses tokens of siblings and of earlier answers as drafts, which vLLM verifies."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "drafts",
    "Uses tokens of siblings and of earlier answers as drafts, which vLLM verifies.",
    faces={
        "device_settings": "vllm_rollout.parts.drafts.acceptance:DraftSettings",
        "simulated": "vllm_rollout.parts.drafts.simulated",
    },
    also={"emulation": {"emulated": "vllm_rollout.parts.drafts.worker.emulated:emulated_drafts"}},
)

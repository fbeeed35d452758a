"""Uses tokens of siblings and of earlier answers as drafts, which vLLM verifies."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "drafts",
    "Uses tokens of siblings and of earlier answers as drafts, which vLLM verifies.",
    needs=("observing",),
    faces={
        "device_settings": "vllm_rollout.parts.drafts.acceptance:DraftSettings",
        "flags": "vllm_rollout.parts.drafts.api:FLAGS",
        "worker": "vllm_rollout.parts.drafts.worker.runner:drafts_of",
    },
    also={
        "emulation": {"emulated": "vllm_rollout.parts.drafts.with_emulation.worker:emulated_drafts"},
        "shaping": {"simulated": "vllm_rollout.parts.drafts.with_shaping.simulated"},
    },
    exports={"Drafts": "vllm_rollout.parts.drafts.worker.drafts:Drafts"},
)

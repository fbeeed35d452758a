"""Uses tokens of siblings and of earlier answers as drafts, which vLLM verifies."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "drafts",
    "Uses tokens of siblings and of earlier answers as drafts, which vLLM verifies.",
    faces={
        "flags": "vllm_rollout.parts.drafts.api:FLAGS",
        "worker": "vllm_rollout.parts.drafts.worker.runner:drafts_of",
    },
    exports={"Drafts": "vllm_rollout.parts.drafts.worker.drafts:Drafts"},
)

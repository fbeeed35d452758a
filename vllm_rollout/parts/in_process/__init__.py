"""Races groups in a trainer's own process, without a server."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "in_process",
    "Races groups in a trainer's own process, without a server.",
    exports={
        "LLM": "vllm_rollout.parts.in_process.api.llm:LLM",
        "AsyncLLM": "vllm_rollout.parts.in_process.api.async_llm:AsyncLLM",
        "teach": "vllm_rollout.parts.in_process.api.teaching:teach",
    },
)

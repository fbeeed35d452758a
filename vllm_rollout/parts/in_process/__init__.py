"""Races groups in a trainer's own process, without a server."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "in_process",
    "Races groups in a trainer's own process, without a server.",
    faces={
        "become_ours": "vllm_rollout.parts.in_process.api.environment:become_ours",
        "plugin": "vllm_rollout.parts.in_process.plugin:take_engines",
    },
    exports={
        "LLM": "vllm_rollout.parts.in_process.api.llm:LLM",
        "AsyncLLM": "vllm_rollout.parts.in_process.api.async_llm:AsyncLLM",
    },
    also_exports={"pruning": {"teach": "vllm_rollout.parts.in_process.with_pruning.api.teaching:teach"}},
    also={
        "pruning": {
            "async_llm": "vllm_rollout.parts.in_process.with_pruning.api.learning:AsyncLearning",
            "llm": "vllm_rollout.parts.in_process.with_pruning.api.learning:Learning",
        }
    },
)

"""Serves an emulated device: step times, lengths and outcomes of a GPU, without computing.

Invariant: every value follows from the settings, the prompt and the request's seed. Time is an argument."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "emulation",
    "Serves an emulated device: step times, lengths and outcomes of a GPU, without computing.",
    faces={
        "flags": "vllm_rollout.parts.emulation.api:FLAGS",
        "commands": "vllm_rollout.parts.emulation.command",
        "extra_args": "vllm_rollout.parts.emulation.options:check_of",
        "engine_args": "vllm_rollout.parts.emulation.options:emulated",
        "next_engine": "vllm_rollout.parts.emulation.options:go_on",
    },
    exports={"emulated_success": "vllm_rollout.parts.emulation.tokens:succeeded"},
)

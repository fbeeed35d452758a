"""Serves an emulated device: step times, lengths and outcomes of a GPU, without computing.

Invariant: every value follows from the settings, the prompt and the request's seed. Time is an argument."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "emulation",
    "Serves an emulated device: step times, lengths and outcomes of a GPU, without computing.",
    needs=("shaping",),
    faces={
        "arguments": "vllm_rollout.parts.emulation.arguments:argument_check",
        "commands": "vllm_rollout.parts.emulation.command",
        "device": "vllm_rollout.parts.emulation.device:device_of",
        "engine_args": "vllm_rollout.parts.emulation.api:on_device",
        "flags": "vllm_rollout.parts.emulation.api:FLAGS",
        "next_engine": "vllm_rollout.parts.emulation.options:go_on",
        "platform": "vllm_rollout.parts.emulation.command:needs_no_device",
        "settings": "vllm_rollout.parts.emulation.settings:Settings",
    },
    exports={"emulated_success": "vllm_rollout.parts.emulation.tokens:succeeded"},
)

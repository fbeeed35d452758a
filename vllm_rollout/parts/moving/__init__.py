"""Places groups on data-parallel ranks by predicted work, moves them, and survives the death of a rank."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "moving",
    "Places groups on data-parallel ranks by predicted work, moves them, and survives the death of a rank.",
    needs=("shaping",),
    faces={"simulated": "vllm_rollout.parts.moving.simulated"},
    also={"emulation": {"emulated": "vllm_rollout.parts.moving.worker.emulated:emulated_moves"}},
)

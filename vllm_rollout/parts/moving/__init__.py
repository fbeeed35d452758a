"""Places groups on data-parallel ranks by predicted work, moves them, and survives the death of a rank."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "moving",
    "Places groups on data-parallel ranks by predicted work, moves them, and survives the death of a rank.",
    needs=("shaping",),
    faces={
        "flags": "vllm_rollout.parts.moving.api.flags:FLAGS",
        "plugin": "vllm_rollout.parts.moving.api.plugin:replace_clients",
    },
    also={"rounds": {"flags": "vllm_rollout.parts.moving.with_rounds.flags:FLAGS"}},
)

"""One client of several servers, which chooses the server of each group."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "fleet",
    "One client of several servers, which chooses the server of each group.",
    needs=(
        "moving",
        "shaping",
        "weights",
    ),
    faces={"several_servers": "vllm_rollout.parts.fleet.fleet:Fleet"},
    also={"rounds": {"several_servers": "vllm_rollout.parts.fleet.with_rounds.client:FleetWithRuns"}},
)

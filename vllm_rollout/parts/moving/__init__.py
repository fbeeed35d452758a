"""Places groups on data-parallel ranks by predicted work, moves them, and survives the death of a rank."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "moving",
    "Places groups on data-parallel ranks by predicted work, moves them, and survives the death of a rank.",
    needs=("shaping",),
    faces={
        "api": "vllm_rollout.parts.moving.api.part:MovingApi",
        "client": "vllm_rollout.parts.moving.client:CLIENT",
        "core": "vllm_rollout.parts.moving.core.moving:GroupMoves",
        "engine_client": "vllm_rollout.parts.moving.api.rank_client:RankClient",
        "fields": "vllm_rollout.parts.moving.http.fields:MovedFields",
        "flags": "vllm_rollout.parts.moving.api.flags:FLAGS",
        "life": "vllm_rollout.parts.moving.api.rank_life:life_of",
        "metrics": "vllm_rollout.parts.moving.http.metrics:MovingMetrics",
        "plan": "vllm_rollout.parts.moving.http.plan:MovingPlan",
        "plugin": "vllm_rollout.parts.moving.api.plugin:replace_processes",
        "rank": "vllm_rollout.parts.moving.rules.placement:PredictedRanks",
        "routes": "vllm_rollout.parts.moving.http.routes:ROUTES",
        "simulated": "vllm_rollout.parts.moving.simulated",
        "worker_calls": "vllm_rollout.parts.moving.worker.move_calls:MoveCalls",
    },
    also={"emulation": {"emulated": "vllm_rollout.parts.moving.with_emulation.worker:emulated_moves"}},
)

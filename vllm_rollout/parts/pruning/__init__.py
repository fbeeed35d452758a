"""Stops candidates by scores, learns from rewards, and votes (ARRoL)."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "pruning",
    "Stops candidates by scores, learns from rewards, and votes (ARRoL).",
    needs=("memories", "observing"),
    faces={
        "api": "vllm_rollout.parts.pruning.api.part:PruningApi",
        "client": "vllm_rollout.parts.pruning.client:CLIENT",
        "core": "vllm_rollout.parts.pruning.core.learning_calls:PruningCore",
        "fields": "vllm_rollout.parts.pruning.http.fields:PrunedFields",
        "flags": "vllm_rollout.parts.pruning.api.flags:FLAGS",
        "memory": "vllm_rollout.parts.pruning.rules.memory:PruningMemory",
        "metrics": "vllm_rollout.parts.pruning.http.metrics:PruningMetrics",
        "operators": "vllm_rollout.parts.pruning.worker.operators:OPERATORS",
        "plan": "vllm_rollout.parts.pruning.http.plan:LearningPlan",
        "routes": "vllm_rollout.parts.pruning.http.routes:ROUTES",
        "simulated": "vllm_rollout.parts.pruning.simulated",
        "step": "vllm_rollout.parts.pruning.rules.step:PruningStep",
        "terms": "vllm_rollout.parts.pruning.rules.terms:PruningRequests",
        "wire": "vllm_rollout.parts.pruning.rules.step:ON_THE_WIRE",
        "worker": "vllm_rollout.parts.pruning.worker.part:pruning_of",
        "worker_calls": "vllm_rollout.parts.pruning.worker.head_calls:HeadCalls",
    },
    also={
        "emulation": {"emulated": "vllm_rollout.parts.pruning.with_emulation.worker:emulated_heads"},
        "shaping": {"prompt_lengths": "vllm_rollout.parts.pruning.with_shaping.rules:prompt_lengths"},
    },
    exports={
        "Pruning": "vllm_rollout.parts.pruning.http.fields:Pruning",
        "QualityHead": "vllm_rollout.parts.pruning.client:QualityHead",
    },
)

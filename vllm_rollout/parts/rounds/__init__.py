"""Tail batching: runs of short and long rounds (RollPacker)."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "rounds",
    "Tail batching: runs of short and long rounds (RollPacker).",
    faces={
        "answers": "vllm_rollout.parts.rounds.http.answers:EVENTS_AND_ANSWERS",
        "api": "vllm_rollout.parts.rounds.api:RoundsApi",
        "client": "vllm_rollout.parts.rounds.client.methods:CLIENT",
        "core": "vllm_rollout.parts.rounds.core:RoundsCore",
        "demo": "vllm_rollout.parts.rounds.demo.run:demo",
        "first": "vllm_rollout.parts.rounds.http.routes:OF_FIRST",
        "metrics": "vllm_rollout.parts.rounds.http.metrics:RoundMetrics",
        "routes": "vllm_rollout.parts.rounds.http.routes:ROUTES",
        "step": "vllm_rollout.parts.rounds.rules.step:RoundsStep",
        "wire": "vllm_rollout.parts.rounds.rules.step:ON_THE_WIRE",
    },
    also={
        "page": {"round_observer": "vllm_rollout.parts.rounds.with_page.http:observer"},
        "pruning": {"routes": "vllm_rollout.parts.rounds.with_pruning.http.routes:ROUTES"},
        "sessions": {
            "api": "vllm_rollout.parts.rounds.with_sessions.api:SessionRoundsApi",
            "run_methods": "vllm_rollout.parts.rounds.with_sessions.client.agent_rounds:AgentRounds",
            "session_rounds": "vllm_rollout.parts.rounds.with_sessions.http.session_rounds",
            "sessions_field": "vllm_rollout.parts.rounds.with_sessions.http.field",
        },
        "shaping": {
            "api": "vllm_rollout.parts.rounds.with_shaping.api.part:ShapedRoundsApi",
            "flags": "vllm_rollout.parts.rounds.with_shaping.api.flags:FLAGS",
            "metrics": "vllm_rollout.parts.rounds.with_shaping.http.metrics:ParallelismMetrics",
            "simulated": "vllm_rollout.parts.rounds.with_shaping.simulated.job:job",
        },
    },
    exports={
        "AsyncRun": "vllm_rollout.parts.rounds.client.run:AsyncRun",
        "Run": "vllm_rollout.parts.rounds.client.run:Run",
    },
    also_exports={
        "sessions": {"AgentRound": "vllm_rollout.parts.rounds.with_sessions.client.agent_rounds:AgentRound"},
    },
)

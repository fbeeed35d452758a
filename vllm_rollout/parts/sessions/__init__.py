"""Candidates that are whole conversations, with one OpenAI request per turn."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "sessions",
    "Candidates that are whole conversations, with one OpenAI request per turn.",
    needs=("rewards",),
    faces={
        "api": "vllm_rollout.parts.sessions.api.part:SessionsApi",
        "app": "vllm_rollout.parts.sessions.api.turns:refuse_full_turns",
        "client": "vllm_rollout.parts.sessions.client.agents:CLIENT",
        "first": "vllm_rollout.parts.sessions.http.routes:OF_FIRST",
        "metrics": "vllm_rollout.parts.sessions.http.metrics:SessionMetrics",
        "routes": "vllm_rollout.parts.sessions.http.routes:ROUTES",
        "xargs": "vllm_rollout.parts.sessions.http.fields:TurnFields",
    },
    also={
        "page": {
            "recorded": "vllm_rollout.parts.sessions.with_page.simulated:read_session_groups",
            "session_observers": "vllm_rollout.parts.sessions.with_page.http.seen:observers",
        },
        "pruning": {
            "scored_says": "vllm_rollout.parts.sessions.with_pruning.api:said",
            "session_refusal": "vllm_rollout.parts.sessions.with_pruning.api:refusal",
        },
        "shaping": {"simulated": "vllm_rollout.parts.sessions.with_shaping.simulated:terms_of"},
    },
    exports={
        "AgentResult": "vllm_rollout.parts.sessions.client.agent_group:AgentResult",
        "AgentGroup": "vllm_rollout.parts.sessions.client.agent_group:AgentGroup",
        "AgentSession": "vllm_rollout.parts.sessions.client.agent_session:AgentSession",
        "SessionLost": "vllm_rollout.parts.sessions.client.agent_session:SessionLost",
        "Void": "vllm_rollout.parts.sessions.client.agent_session:Void",
    },
)

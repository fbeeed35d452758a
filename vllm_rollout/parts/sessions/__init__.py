"""Candidates that are whole conversations, with one OpenAI request per turn."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "sessions",
    "Candidates that are whole conversations, with one OpenAI request per turn.",
    needs=("rewards",),
    faces={
        "metrics": "vllm_rollout.parts.sessions.http.metrics:SessionMetrics",
        "routes": "vllm_rollout.parts.sessions.http.routes:ROUTES",
    },
    also={
        "page": {"session_observers": "vllm_rollout.parts.sessions.with_page.http.seen:observers"},
        "pruning": {"scored_says": "vllm_rollout.parts.sessions.with_pruning.api:said"},
    },
)

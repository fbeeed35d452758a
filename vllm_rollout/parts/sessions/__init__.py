"""Candidates that are whole conversations, with one OpenAI request per turn."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "sessions",
    "Candidates that are whole conversations, with one OpenAI request per turn.",
    needs=("rewards",),
    faces={"simulated": "vllm_rollout.parts.sessions.simulated.sessions:terms_of"},
    also={"page": {"recorded": "vllm_rollout.parts.sessions.simulated.recorded:read_session_groups"}},
)

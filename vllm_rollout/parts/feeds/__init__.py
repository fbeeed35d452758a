"""Asynchronous training: batches of groups from a feed that never stops, with a bound on staleness."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "feeds",
    "Asynchronous training: batches of groups from a feed that never stops, with a bound on staleness.",
    needs=("weights",),
    faces={
        "api": "vllm_rollout.parts.feeds.api:FeedsApi",
        "client": "vllm_rollout.parts.feeds.client.methods:CLIENT",
        "first": "vllm_rollout.parts.feeds.http.routes:OF_FIRST",
        "metrics": "vllm_rollout.parts.feeds.http.metrics:FeedMetrics",
        "routes": "vllm_rollout.parts.feeds.http.routes:ROUTES",
    },
    also={
        "page": {"shown": "vllm_rollout.parts.feeds.with_page.http:show"},
        "sessions": {
            "feed_methods": "vllm_rollout.parts.feeds.with_sessions.client.agents:AgentFeed",
            "harnesses": "vllm_rollout.parts.feeds.with_sessions.http.harnesses",
            "routes": "vllm_rollout.parts.feeds.with_sessions.http.routes:ROUTES",
            "session_group": "vllm_rollout.parts.feeds.with_sessions.http.answers:SessionFeedGroup",
            "sessions_field": "vllm_rollout.parts.feeds.with_sessions.http.field",
        },
        "rounds": {"going_on": "vllm_rollout.parts.feeds.with_rounds.http:GoingOn"},
    },
    exports={
        "AsyncFeed": "vllm_rollout.parts.feeds.client.feed:AsyncFeed",
        "Feed": "vllm_rollout.parts.feeds.client.feed:Feed",
    },
)

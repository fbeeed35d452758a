"""Limits the running candidates, if the KV cache would not hold all of them at their longest.

vLLM admits every request whose prompt fits, and preempts when running requests have grown. A preempted request is
computed again from its start. This rule keeps room for each candidate to grow by a share of a mean length. Preemptions
fall to a fifth or less, and the rollout ends sooner. With more room, places stay empty and it ends later
(docs/development/log.md, "Who runs first").
"""

from __future__ import annotations

GROWTH_SHARE = 1 / 8
"""Free room kept for each running candidate, as a share of the mean length."""


def most_running(free_tokens: int, mean_tokens: float) -> int:
    """Candidates that may run if the KV cache has `free_tokens` left. At least one.

    mean_tokens: estimated mean length, in output tokens, as if no candidate were stopped.
    """
    return max(1, int(free_tokens / (GROWTH_SHARE * max(mean_tokens, 1.0))))

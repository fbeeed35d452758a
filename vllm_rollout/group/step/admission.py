"""How many candidates may run where the KV cache would not hold them all at their longest.

vLLM admits whoever's prompt fits, and preempts when those that run have grown; all that a preempted one had is computed
again. With room left for each of them to grow by a share of a mean length, preemptions fall to a fifth and fewer, and
the rollout ends sooner; with more room places stand empty, and it ends later
(docs/development/log.md, "Who runs first").
"""

from __future__ import annotations

GROWTH_SHARE = 1 / 8
"""What is kept free for each candidate that runs, as a part of a mean length."""


def most_running(free_tokens: int, mean_tokens: float) -> int:
    """Candidates that may run when so much of the KV cache is free; one, at least.

    mean_tokens: of lengths that were seen, as they would be if nobody was stopped.
    """
    return max(1, int(free_tokens / (GROWTH_SHARE * max(mean_tokens, 1.0))))

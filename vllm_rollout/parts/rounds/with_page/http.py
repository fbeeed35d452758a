"""Rounds on the page: the outcome of each run's last round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.parts.page.http.plan import PagePlan
from vllm_rollout.parts.rounds.http.answers import RoundSummary

SHOWN = {"run", "round", "kind", "deferred", "next_round", "num_waiting"}


def observer(rollouts: RolloutService) -> Callable[[RoundSummary, Sequence[str]], None]:
    """A function that shows the summary of a round, and the ids of prompts that wait for a long round."""
    viewers = rollouts.part(PagePlan).viewers
    return lambda summary, queue: viewers.round_over(summary.run, summary.model_dump(include=SHOWN), queue)

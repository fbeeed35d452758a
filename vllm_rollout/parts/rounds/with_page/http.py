"""Rounds on the page: the outcome of each run's last round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_rollout.kernel.http.answers import RoundSummary
from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.parts.page.http.plan import PagePlan


def observer(rollouts: RolloutService) -> Callable[[RoundSummary, Sequence[str]], None]:
    """A function that shows the summary of a round, and the ids of prompts that wait for a long round."""
    return rollouts.part(PagePlan).viewers.round_over

"""Values of a scored turn for pruning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.parts.pruning.http.plan import LearningPlan
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.step import SCORING
from vllm_rollout.parts.sessions.http.groups import OpenTurn
from vllm_rollout.parts.sessions.http.service import SCORED


def refusal(rollouts: RolloutService) -> Callable[[], str | None]:
    """A function that returns the reason why sessions cannot be scored here. None: they can."""
    learning = rollouts.part(LearningPlan).learning
    return lambda: learning.pruning_refusal


def said(turn: OpenTurn) -> dict[str, Any]:
    return SCORING.value(Scoring(turn.group.engine_id, SCORED, turn.group.seed))

"""Values of a scored turn for pruning."""

from __future__ import annotations

from typing import Any

from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.step import SCORING
from vllm_rollout.parts.sessions.http.groups import OpenTurn
from vllm_rollout.parts.sessions.http.service import SCORED


def said(turn: OpenTurn) -> dict[str, Any]:
    return SCORING.value(Scoring(turn.group.engine_id, SCORED, turn.group.seed))

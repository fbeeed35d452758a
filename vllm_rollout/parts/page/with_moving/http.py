"""Ranks on the page: what each does, and its load."""

from __future__ import annotations

from vllm_rollout.kernel.http.engine import Engine
from vllm_rollout.parts.moving.http.body import EngineAnswer
from vllm_rollout.parts.moving.http.engine import MovesPart
from vllm_rollout.parts.moving.rules.load import EngineLoad


async def ranks(engine: Engine) -> list[tuple[str, EngineLoad]]:
    """State and load by rank. Raises: EngineStopped."""
    states = await engine.part(MovesPart).rank_states()
    return [(EngineAnswer.of(rank, its).state, its.load) for rank, its in enumerate(states)]

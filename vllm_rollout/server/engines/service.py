"""Ranks over HTTP: their load, and emptying them. Invariant: some rank always takes groups."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from vllm_rollout.group.ranks.scaling import Progress
from vllm_rollout.server.engine import MovesPart, RequestError
from vllm_rollout.server.engines.body import (
    AdviceAnswer,
    DrainAnswer,
    DrainRequest,
    EngineAnswer,
    EnginesAnswer,
    ScaleDownAdvice,
    state_of,
)


class EnginesService:
    """What the endpoints about ranks ask of an engine's moves."""

    def __init__(self, moves: MovesPart, progress: Callable[[], Progress]) -> None:
        """`progress`: of all rollouts on their way."""
        self._moves = moves
        self._progress = progress

    async def engines(self) -> EnginesAnswer:
        loads = await self._moves.engine_loads()
        return EnginesAnswer(engines=[EngineAnswer.of(rank, load) for rank, load in enumerate(loads)])

    async def advice(self) -> AdviceAnswer:
        progress = self._progress()
        advice = await self._moves.plan_scale_down(progress)
        return AdviceAnswer(
            num_responses=progress.num_responses,
            num_complete=progress.num_complete,
            scale_down=ScaleDownAdvice(reason=advice.reason, told=advice.explanation, ranks=list(advice.ranks)),
        )

    async def drain(self, rank: int, request: DrainRequest) -> DrainAnswer:
        """Raises: RequestError, 404 for a rank that is not there, 409 for the last one that takes groups."""
        self._check(rank)
        drained = await self._moves.drain(rank, request.timeout_s)
        return DrainAnswer(
            rank=rank,
            state=state_of(drained.is_held, drained.num_left),
            num_moved=drained.num_moved,
            num_left=drained.num_left,
            reasons=dict(drained.reasons),
            seconds=drained.seconds,
        )

    async def restore(self, rank: int) -> EngineAnswer:
        """Raises: RequestError, 404 for a rank that is not there."""
        self._check(rank)
        await self._moves.restore(rank)
        return EngineAnswer.of(rank, (await self._moves.engine_loads())[rank])

    def _check(self, rank: int) -> None:
        num_ranks = self._moves.num_ranks
        if rank >= num_ranks:
            allowed = "only rank 0" if num_ranks == 1 else f"ranks 0 to {num_ranks - 1}"
            raise RequestError(
                f"there is no rank {rank}: this server has {allowed} (--data-parallel-size). See GET /v1/engines.",
                status=HTTPStatus.NOT_FOUND,
                param="rank",
            )

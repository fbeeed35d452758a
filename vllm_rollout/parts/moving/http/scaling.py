"""Ranks that are freed while a rollout still runs (RollPacker 4.4).

Invariant: a rank that was freed for a rollout is restored when the rollout is over, unless another owner keeps it
empty.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from vllm_rollout.background import spawn
from vllm_rollout.kernel.http.answers import RanksFreeEvent
from vllm_rollout.kernel.http.engine import Engine, EngineStopped, RequestError
from vllm_rollout.parts.moving.http.engine import MovesPart
from vllm_rollout.parts.moving.http.fields import MovedFields
from vllm_rollout.parts.moving.rules.scaling import Progress, not_now

logger = logging.getLogger("vllm.vllm_rollout")

DRAIN_TIMEOUT_S = 60.0
"""Seconds that a freed rank's remaining work may run. Work that cannot move may still be there afterwards."""


def check(engine: Engine, request: MovedFields) -> None:
    """Raises: RequestError for a request whose groups may move, where they cannot."""
    for field, wanted, priced in (("migration", request.migration, True), ("scale_down", request.scale_down, False)):
        if wanted != "off" and (refusal := engine.part(MovesPart).refusal(priced=priced)) is not None:
            raise RequestError(f'{field}: "{wanted}" {refusal}', param=field)


class ScaleDownWatch:
    """Watches the candidates of one rollout end, and frees half of the ranks once that is advised."""

    def __init__(self, moves: MovesPart, rollout_id: str, num_responses: int, clock: Callable[[], float]) -> None:
        self._moves = moves
        self._owner = rollout_id
        self._clock = clock
        self._progress = Progress(num_responses, 0)
        self._news = asyncio.Event()
        self._held: list[int] = []
        self._task: asyncio.Task[None] | None = None

    def candidate_ended(self) -> None:
        """Count a candidate that ended. Candidates launched later count too, up to the number at the start."""
        num_complete = min(self._progress.num_complete + 1, self._progress.num_responses)
        self._progress = replace(self._progress, num_complete=num_complete)
        if not_now(self._progress) is None:
            self._news.set()

    def begin(self, tell: Callable[[RanksFreeEvent], Awaitable[None]]) -> None:
        """Start watching. `tell` is called once ranks are free."""
        self._task = spawn(self._run(self._clock(), tell), "scale-down")

    async def end(self) -> None:
        """End a rollout's watch and take its ranks back. Callers must wait for this to its end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._give_back()

    async def _run(self, started: float, tell: Callable[[RanksFreeEvent], Awaitable[None]]) -> None:
        try:
            while not self._progress.is_scaled_down:
                await self._news.wait()
                self._news.clear()
                freed = await self._check(started)
                if freed is not None:
                    await tell(freed)
        except RequestError as error:  # a rank that was drained meanwhile, or a dead engine: reported elsewhere
            logger.warning("no ranks are freed: %s", error)
        finally:
            if not self._progress.is_scaled_down:
                await self._give_back()

    async def _give_back(self) -> None:
        """Restore the ranks that this rollout keeps empty."""
        while self._held:
            with suppress(EngineStopped):  # reported elsewhere
                await self._moves.restore(self._held.pop(), self._owner)

    async def _check(self, started: float) -> RanksFreeEvent | None:
        """Free ranks if that is advised. Ranks that are not empty then are given back. None if no rank is free."""
        decision = await self._moves.plan_scale_down(self._progress)
        if decision.was_checked:
            self._progress = replace(self._progress, num_complete_at_check=self._progress.num_complete)
        if decision.reason != "free":
            return None
        before = self._clock()
        num_moved = 0
        for rank in decision.ranks:
            self._held.append(rank)
            num_moved += (await self._moves.drain(rank, 0.0, self._owner)).num_moved
        freed = []
        for rank in decision.ranks:
            drained = await self._moves.drain(rank, DRAIN_TIMEOUT_S, self._owner)
            num_moved += drained.num_moved
            if drained.is_held and not drained.num_left:
                freed.append(rank)
                continue
            logger.warning(
                "rank %d is not freed: %d requests are left, %s", rank, drained.num_left, dict(drained.reasons)
            )
            self._held.remove(rank)
            await self._moves.restore(rank, self._owner)
        if not freed:
            return None
        self._progress = replace(self._progress, is_scaled_down=True)
        now = self._clock()
        return RanksFreeEvent(
            ranks=freed,
            after_s=now - started,
            seconds=now - before,
            num_moved=num_moved,
            reason=decision.explanation,
        )

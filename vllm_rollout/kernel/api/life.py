"""Detection of dead engines and dead ranks. Requests and calls that wait for them fail.

Invariant: no request waits for a dead rank. Its groups have ended, and it gets no others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Protocol

from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import SchedulerStats

from vllm_rollout.background import spawn, survived
from vllm_rollout.kernel.api.group_routes import GroupRoutes
from vllm_rollout.kernel.api.life_port import Death, LifePart
from vllm_rollout.kernel.api.rank_died import RankDied
from vllm_rollout.kernel.parts import faces

logger = init_logger("vllm.vllm_rollout")

LOOK_S = 0.25
"""Seconds between two checks."""


class WatchedClient(Protocol):
    """The part of an engine client that the watch needs."""

    engine_core: Any
    output_processor: Any
    logger_manager: Any
    """`engine_core`, `output_processor` and `logger_manager` are those of AsyncLLM."""
    routes: GroupRoutes

    @property
    def num_ranks(self) -> int: ...

    @property
    def errored(self) -> bool: ...

    def lose(self, request_ids: Iterable[str], error: Exception) -> None: ...


class Life:
    """State of the engine behind one engine client: which ranks have died."""

    def __init__(self, client: WatchedClient) -> None:
        self._client = client
        made = [make(client) for _, make in faces("life")]
        self._parts: list[LifePart] = [part for part in made if part is not None]
        self._watching: asyncio.Task[None] | None = None
        self.dead: dict[int, Death] = {}
        """Deaths by rank."""

    @property
    def living_ranks(self) -> list[int]:
        return [rank for rank in range(self._client.num_ranks) if rank not in self.dead]

    def watch(self) -> None:
        """Start watching, until the engine dies."""
        if self._watching is None or self._watching.done():
            self._watching = spawn(self._watch(), "watching ranks")

    async def _watch(self) -> None:
        while not self._client.errored:
            for part in self._parts:
                with survived("watching ranks"):
                    for death in part.deaths():
                        if death.rank not in self.dead:
                            self._bury(death)
            await asyncio.sleep(LOOK_S)
        # vLLM fails waiting requests when it reads from a dead engine, but its client may be closed before.
        self._client.output_processor.propagate_error(EngineDeadError())

    def _bury(self, death: Death) -> None:
        """Mark a rank as dead. Its requests are failed in the background."""
        self.dead[death.rank] = death
        for part in self._parts:
            with survived("a rank's death"):
                part.died(death)
        self._client.routes.bury(death.rank)
        spawn(self._tell(death.rank), "telling of a dead rank")

    async def _tell(self, rank: int) -> None:
        """Fail the requests of a dead rank.

        This waits for moves, and a move between two dead ranks ends once both are marked as dead. So it runs in the
        background of the watch.
        """
        client = self._client
        for route in client.routes.on_rank(rank):
            await route.at_rest()  # one that leaves a dead rank may arrive elsewhere
        client.routes.leave_dead(rank)
        lost: list[str] = []
        for part in self._parts:
            with survived("requests of a dead rank"):
                lost += part.requests_of(rank)
        logger.error("vllm_rollout: rank %d has died, and %d requests with it; the other ranks go on", rank, len(lost))
        client.lose(lost, RankDied.of(rank))
        if client.logger_manager is not None:  # its last statistics would be shown for ever
            client.logger_manager.record(scheduler_stats=SchedulerStats(), iteration_stats=None, engine_idx=rank)

"""Ranks of an engine that die one by one. Requests and calls that wait for a dead rank fail.

Invariant: no request waits for a dead rank. Its groups have ended, and it gets no others.
"""

from __future__ import annotations

from vllm.logger import init_logger
from vllm.v1.metrics.stats import SchedulerStats

from vllm_rollout.background import spawn, survived
from vllm_rollout.kernel.api.client import RolloutAsyncLLM
from vllm_rollout.kernel.api.engine_calls import RankDied
from vllm_rollout.kernel.api.group_routes import GroupRoutes
from vllm_rollout.kernel.api.life import Life
from vllm_rollout.parts.moving.api.deaths import Deaths

logger = init_logger("vllm.vllm_rollout")


class RankLife(Life):
    """Overrides: __init__, living_ranks, look."""

    _client: RolloutAsyncLLM

    def __init__(self, client: RolloutAsyncLLM, file: Deaths) -> None:
        """`client`: its `engine_core` is a `RankClient` where a rank may die. `file`: the server's file of deaths."""
        super().__init__(client)
        self._file = file
        self._dead: set[int] = set()

    @property
    def living_ranks(self) -> list[int]:
        return [rank for rank in range(self._client.num_ranks) if rank not in self._dead]

    def look(self) -> None:
        for death in self._file.read():
            if death.rank not in self._dead:
                self._bury(death.rank)

    def _bury(self, rank: int) -> None:
        """Mark a rank as dead: nothing is sent to it from now on, and no call waits for it. Its requests are failed in
        the background."""
        self._dead.add(rank)
        with survived("a rank's death"):
            self._client.engine_core.bury(rank)
        self._client.routes.bury(rank)
        spawn(self._tell(rank), "telling of a dead rank")

    async def _tell(self, rank: int) -> None:
        """Fail the requests of a dead rank.

        This waits for moves, and a move between two dead ranks ends once both are marked as dead. So it runs in the
        background of the watch.
        """
        client = self._client
        for route in client.routes.on_rank(rank):
            await route.door.opened()  # one that leaves a dead rank may arrive elsewhere
        leave_dead(client.routes, rank)
        lost: list[str] = client.engine_core.requests_of(rank)
        logger.error("vllm_rollout: rank %d has died, and %d requests with it; the other ranks go on", rank, len(lost))
        client.lose(lost, RankDied.of(rank))
        if client.logger_manager is not None:  # its last statistics would be shown for ever
            client.logger_manager.record(scheduler_stats=SchedulerStats(), iteration_stats=None, engine_idx=rank)


def leave_dead(routes: GroupRoutes, rank: int) -> None:
    """Let later candidates of a dead rank's joined groups start on another rank."""
    for route in routes.on_rank(rank):
        if route.placed is None and routes.has_open:
            routes.arrived(route, routes.next_rank())


def life_of(client: RolloutAsyncLLM) -> Life:
    """In an engine of a trainer's own process, where no file is written, all ranks live."""
    file = Deaths.of_this_server()
    return Life(client) if file is None else RankLife(client, file)

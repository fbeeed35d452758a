"""Rollouts that a client aborts by name. Invariant: once a rollout is marked, no group of it is launched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import suppress

from vllm_rollout.background import spawn
from vllm_rollout.kernel.call_table import ABORT_REQUESTS
from vllm_rollout.kernel.http.engine import CandidateEnd, Engine, EngineStopped, GroupOrder, Happening
from vllm_rollout.kernel.http.rollout import Rollout
from vllm_rollout.kernel.rules.types import ABORTED, Ending

AGAIN_S = 0.1
"""Seconds between two aborts of a rollout, whose last groups may have been on their way to the engine."""


class Aborts:
    """Aborts rollouts of one API process."""

    def __init__(self, engine: Engine, active: Mapping[str, Rollout]) -> None:
        """`active`: running rollouts by id."""
        self._engine, self._active = engine, active

    def named(self, names: Collection[str]) -> None:
        """Abort the rollouts that have one of these names (`names_of_request`)."""
        for rollout in self._active.values():
            if not rollout.names.isdisjoint(names):
                self.mark(rollout)

    def all(self) -> None:
        """Abort every rollout of this API process."""
        for rollout in self._active.values():
            self.mark(rollout)

    def mark(self, rollout: Rollout) -> None:
        """Launch no group of this rollout from now on, and abort those that began before."""
        if not rollout.is_aborted:
            rollout.is_aborted = True
            spawn(self._abort(rollout.id), "abort of a rollout")

    async def _abort(self, rollout_id: str) -> None:
        """Abort what runs of a rollout, until the rollout is over."""
        with suppress(EngineStopped):  # reported elsewhere
            while rollout_id in self._active:
                await self._engine.calls.call_all(ABORT_REQUESTS, [rollout_id])
                await asyncio.sleep(AGAIN_S)


async def not_launched(order: GroupOrder) -> AsyncGenerator[Happening, None]:
    """The ends of a group's candidates whose rollout was aborted before."""
    indices = range(order.plan.num_candidates) if order.beginnings is None else order.beginnings.token_ids
    for index in indices:
        yield CandidateEnd(Ending(index, "failed", 0), (), None, "", "abort", None, None, (), error=ABORTED)

"""Runs at several servers. Invariant: a run stays at the server that has it."""

from __future__ import annotations

import uuid

from typing_extensions import Unpack

from vllm_rollout.kernel.client.connection import RolloutError
from vllm_rollout.parts.fleet.fleet import Fleet
from vllm_rollout.parts.rounds.client import run_calls
from vllm_rollout.parts.rounds.client.run import AsyncRun
from vllm_rollout.parts.rounds.client.run_calls import RunOptions


class FleetWithRuns(Fleet):
    """Creates and finds runs at the right servers. Overrides: run."""

    async def run(
        self, group_size: int, prompts_per_round: int, id: str | None = None, **options: Unpack[RunOptions]
    ) -> AsyncRun:
        await self._look()
        server = None if id is None else await self._server_of_run(id)
        if server is None:
            group = self._servers.place("run", group_size * prompts_per_round)
            self._servers.over(group)
            server = group.server
        call = run_calls.create_run(group_size, prompts_per_round, id or f"run-{uuid.uuid4().hex}", **options)
        return AsyncRun(self._members[server], await self._members[server].send(call))

    async def _server_of_run(self, id: str) -> int | None:
        found = await self.found(run_calls.run(id))
        if not isinstance(found, RolloutError):
            return found[0]
        if self._servers.out:
            reasons = "; ".join(self._reasons[number] for number in sorted(self._servers.out))
            raise RolloutError(
                None,
                f"run {id!r} is at no server that answers, and may be at one that does not ({reasons}). Start that one "
                "again, or leave it out of the client's list.",
                "ConnectError",
            )
        return None

"""Methods of the clients about runs."""

from __future__ import annotations

import uuid

from typing_extensions import Unpack

from vllm_rollout.kernel.client.blocking import Blocked, blocking
from vllm_rollout.kernel.client.methods import ClientPart, awaited
from vllm_rollout.kernel.client.sender import Sender
from vllm_rollout.parts.rounds.client import run_calls
from vllm_rollout.parts.rounds.client.run import AsyncRun, Run
from vllm_rollout.parts.rounds.client.run_calls import RunOptions


class AsyncRunCalls(Sender):
    """Methods of the async client."""

    runs = awaited(run_calls.runs)

    async def run(
        self, group_size: int, prompts_per_round: int, id: str | None = None, **options: Unpack[RunOptions]
    ) -> AsyncRun:
        id = id or f"run-{uuid.uuid4().hex}"  # made here, so that a repeated request makes no second run
        return AsyncRun(self, await self.send(run_calls.create_run(group_size, prompts_per_round, id, **options)))

    run.__doc__ = run_calls.create_run.__doc__


class RunCalls(Blocked):
    """Methods of the sync client."""

    runs = blocking(AsyncRunCalls.runs)

    def run(self, group_size: int, prompts_per_round: int, id: str | None = None, **options: Unpack[RunOptions]) -> Run:
        return Run(self._finish(self._awaited.run(group_size, prompts_per_round, id, **options)), self._finish)

    run.__doc__ = run_calls.create_run.__doc__


CLIENT = ClientPart(AsyncRunCalls, RunCalls)

"""Types of runs that users see. `mypy` checks this file, and nothing runs it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import assert_type

from vllm_rollout import AgentRound, AgentSession, AsyncRolloutClient, AsyncRun, RolloutClient
from vllm_rollout.answers import RoundAnswer


async def agent(session: AgentSession) -> float:
    return float(session.number)


def with_sync(client: RolloutClient) -> None:
    run = client.run(2, 4, filter="zero_variance")
    assert_type(run.round(["p"], early_stop=True), RoundAnswer)
    assert_type(run.rounds(["p"]), Generator[RoundAnswer, None, None])
    run.round(["p"], nothing=1)  # type: ignore[call-arg]


async def with_async(client: AsyncRolloutClient) -> None:
    run = await client.run(2, 4)
    assert_type(run, AsyncRun)
    assert_type(run.agent_rounds(["p"], run=agent), AsyncGenerator[AgentRound, None])

"""Types of agents that users see. `mypy` checks this file, and nothing runs it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import assert_type

from vllm_rollout import AgentGroup, AgentSession, AsyncRolloutClient, RolloutClient


async def agent(session: AgentSession) -> float:
    return float(session.number)


def with_clients(client: AsyncRolloutClient, blocking: RolloutClient) -> None:
    assert_type(client.agents(["p"], 2, run=agent, max_turns=2), AsyncGenerator[AgentGroup, None])
    blocking.agents  # type: ignore[attr-defined]  # noqa: B018

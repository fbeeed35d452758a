"""Options of earlier versions that agents, and runs of agents, refuse."""

from __future__ import annotations

import httpx
import pytest

from tests.kernel.http.test_renamed import REMOVED_NAMES
from vllm_rollout.kernel.client.body import option_fields
from vllm_rollout.parts.sessions.client.agents import AgentOptions


@REMOVED_NAMES
def test_the_client_of_agents_refuses_a_removed_option(removed: str) -> None:
    with pytest.raises(TypeError, match=f"^{removed}: removed, leave it out: let rounds filter"):
        option_fields({removed: "variance"}, AgentOptions)


@REMOVED_NAMES
async def test_a_group_of_sessions_refuses_a_removed_field(http: httpx.AsyncClient, removed: str) -> None:
    response = await http.post("/v1/groups", json={removed: "variance"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, removed)

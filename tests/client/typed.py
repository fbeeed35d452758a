"""Types that users see: `mypy` checks this file, and nothing runs it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import assert_type

from vllm_rollout import AgentGroup, AgentSession, AsyncRolloutClient, QualityHead, RolloutClient, RolloutOptions
from vllm_rollout.kernel.http.answers import Event, RolloutAnswer, RoundAnswer
from vllm_rollout.parts.moving.http.body import EngineAnswer


async def agent(session: AgentSession) -> float:
    return float(session.number)


async def with_async(client: AsyncRolloutClient, options: RolloutOptions) -> None:
    assert_type(await client.rollout(["p"], 2, **options), RolloutAnswer)
    assert_type(client.stream(["p"], 2, stream_tokens=4, pruning={"detection_length": 8}), AsyncGenerator[Event, None])
    assert_type(client.agents(["p"], 2, run=agent), AsyncGenerator[AgentGroup, None])
    assert_type(await client.quality_head(), QualityHead)
    async with AsyncRolloutClient(["http://a", "http://b"], num_retries=1):
        pass
    await client.rollout(["p"], 2, nothing=1)  # type: ignore[call-arg]
    await client.rollout(["p"], 2, order=1)  # type: ignore[arg-type]
    client.nothing()  # type: ignore[attr-defined]


def with_sync() -> None:
    with RolloutClient("http://a", api_key="key") as client:
        assert_type(client.engines(), list[EngineAnswer])
        assert_type(client.stream(["p"], 2), Generator[Event, None, None])
        assert_type(client.run(2, 4, filter="zero_variance").round(["p"]), RoundAnswer)
        client.agents  # type: ignore[attr-defined]  # noqa: B018
    RolloutClient("http://a", nothing=1)  # type: ignore[call-arg]

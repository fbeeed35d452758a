"""Types of the clients that users see. `mypy` checks this file, and nothing runs it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import assert_type

from vllm_rollout import AsyncRolloutClient, RolloutClient, RolloutOptions
from vllm_rollout.answers import Event, RolloutAnswer


async def with_async(client: AsyncRolloutClient, options: RolloutOptions) -> None:
    assert_type(await client.rollout(["p"], 2, **options), RolloutAnswer)
    assert_type(client.stream(["p"], 2, stream_tokens=4, early_stop=None), AsyncGenerator[Event, None])
    async with AsyncRolloutClient(["http://a", "http://b"], num_retries=1):
        pass
    await client.rollout(["p"], 2, nothing=1)  # type: ignore[call-arg]
    await client.rollout(["p"], 2, selection=1)  # type: ignore[arg-type]
    client.nothing()  # type: ignore[attr-defined]


def with_sync() -> None:
    with RolloutClient("http://a", api_key="key") as client:
        assert_type(client.stream(["p"], 2), Generator[Event, None, None])
    RolloutClient("http://a", nothing=1)  # type: ignore[call-arg]

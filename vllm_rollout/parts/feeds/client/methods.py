"""Methods of the clients about feeds."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from typing_extensions import Unpack

from vllm_rollout.kernel.client.blocking import Blocked, blocking
from vllm_rollout.kernel.client.methods import ClientPart, awaited
from vllm_rollout.kernel.client.sender import Sender
from vllm_rollout.parts.feeds.client import feed_calls
from vllm_rollout.parts.feeds.client.feed import AsyncFeed, Feed
from vllm_rollout.parts.feeds.client.feed_calls import FeedOptions


class FeedToCreate:
    """A feed that is created when it is awaited, or when its `async with` block begins."""

    def __init__(self, client: Sender, call: Any) -> None:
        self._client, self._call = client, call

    async def _created(self) -> AsyncFeed:
        return AsyncFeed(self._client, await self._client.send(self._call))

    def __await__(self) -> Generator[Any, None, AsyncFeed]:
        return self._created().__await__()

    async def __aenter__(self) -> AsyncFeed:
        self._feed = await self._created()
        return self._feed

    async def __aexit__(self, *exception: object) -> None:
        await self._feed.__aexit__(*exception)


class AsyncFeedCalls(Sender):
    """Methods of the async client."""

    feeds = awaited(feed_calls.feeds)
    delete_feed = awaited(feed_calls.delete_feed)

    def feed(self, group_size: int, batch: int, id: str | None = None, **options: Unpack[FeedOptions]) -> FeedToCreate:
        id = id or feed_calls.new_key("feed")  # made here, so that a repeated request makes no second feed
        return FeedToCreate(self, feed_calls.create_feed(group_size, batch, id, **options))

    feed.__doc__ = feed_calls.create_feed.__doc__


class FeedCalls(Blocked):
    """Methods of the sync client."""

    feeds = blocking(AsyncFeedCalls.feeds)
    delete_feed = blocking(AsyncFeedCalls.delete_feed)

    def feed(self, group_size: int, batch: int, id: str | None = None, **options: Unpack[FeedOptions]) -> Feed:
        created = self._awaited.feed(group_size, batch, id, **options)._created()
        return Feed(self._finish(created), self._finish)

    feed.__doc__ = feed_calls.create_feed.__doc__


CLIENT = ClientPart(AsyncFeedCalls, FeedCalls)

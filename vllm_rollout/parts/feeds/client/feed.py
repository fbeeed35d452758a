"""A feed as trainers use it: `for batch in feed`. Invariant: a batch that was taken is asked for until it has come."""

from __future__ import annotations

import time
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Self

from vllm_rollout.config import MAX_PROMPTS
from vllm_rollout.kernel.client.blocking import Blocked, blocking, blocking_generator, finished
from vllm_rollout.kernel.client.body import PromptLike
from vllm_rollout.kernel.client.connection import CONNECTION_LOST, POLL_INTERVAL_S, RolloutError
from vllm_rollout.kernel.client.sender import Sender
from vllm_rollout.kernel.parts import faces
from vllm_rollout.parts.feeds.client import feed_calls
from vllm_rollout.parts.feeds.http.answers import FeedAnswer, FeedBatch
from vllm_rollout.parts.feeds.http.body import DEFAULT_TIMEOUT_S

FORGOTTEN = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.GONE)
"""Statuses after which no batch comes by a key."""
ENDING = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE)
"""Statuses of a server that stops or starts, and of a proxy without one."""
LOST = frozenset(error.__name__ for error in CONNECTION_LOST)
"""Types of errors of a lost connection."""
CUT = LOST - {"ConnectError", "ConnectTimeout"}
"""Types of errors of a connection that there was."""
IDLE_S = 20.0
"""Seconds after which a proxy may cut a connection without traffic. The client's own attempts take less."""
RECONNECT_S = 120.0
"""Seconds for which a request for a batch is repeated while the server is missing. A small server starts in them."""

if TYPE_CHECKING:
    from vllm_rollout import FeedMethods
else:
    FeedMethods = type("FeedMethods", tuple(methods for _, methods in faces("feed_methods")), {})
    """Methods of feeds that need another part."""


class AsyncFeed(FeedMethods):
    """A feed of an `AsyncRolloutClient`. Use as an async context manager, and iterate over its batches."""

    def __init__(self, client: Sender, answer: FeedAnswer) -> None:
        self._client = client
        self.id = answer.id
        self.info = answer
        """The feed as last read from the server."""
        self._keys: list[str] = []
        """Keys of batches that were asked for and did not come."""
        self._may_have_given = answer.num_batches > 0
        """False if no batch can have had a group."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, version={self.info.version})"

    async def refresh(self) -> FeedAnswer:
        """Read the feed from the server. Raises: RolloutError (404)."""
        self.info = await self._client.send(feed_calls.feed(self.id))
        return self.info

    async def put(self, prompts: Iterable[PromptLike], *, key: str | None = None) -> FeedAnswer:
        """Put prompts behind those that wait.

        key: your name for these prompts, of at most 250 characters. If you repeat the call with this key, after a crash
        too, the prompts are not put again.

        Raises: RolloutError, 409 if the key has put other prompts. TypeError for a single prompt.
        """
        if isinstance(prompts, str | dict):
            raise TypeError(f"prompts must be an iterable of prompts, got one {type(prompts).__name__}")
        rest, key = iter(prompts), key or feed_calls.new_key("put")
        numbers = count()
        while portion := list(islice(rest, MAX_PROMPTS)):
            self.info = await self._client.send(feed_calls.put(self.id, portion, f"{key}-{next(numbers)}"))
        return self.info

    async def batch(
        self,
        *,
        drain: bool = False,
        key: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        reconnect_s: float = RECONNECT_S,
    ) -> FeedBatch:
        """Wait for a batch, and take it.

        drain: if no prompt waits and nothing runs, return the groups there are, perhaps none.
        key: your name for the batch. A second call with this key gives this batch again. None: a new key, or the key of
        a call that raised, since the server may have taken its batch.
        timeout_s: seconds for which the server waits for the batch.
        reconnect_s: seconds for which the request is repeated if the server was lost or asks for another attempt. 0:
        the client retries as for any other request.

        Raises: RolloutError, 504 if there is no batch in time. Its message says what the batch waits for. If the server
        was lost, repeat the call with its key, or without one.
        """
        if not key:
            with self._key() as key:
                return await self.batch(drain=drain, key=key, timeout_s=timeout_s, reconnect_s=reconnect_s)
        until, left_s = None, timeout_s
        end = time.monotonic() + timeout_s
        while True:
            began = time.monotonic()
            try:
                batch = await self._client.send(feed_calls.batch(self.id, key, drain=drain, timeout_s=left_s))
            except RolloutError as error:
                wait_s = error.retry_after_s or POLL_INTERVAL_S
                if error.type in CUT and began + IDLE_S < time.monotonic() < end:  # a server was there
                    until, left_s = None, max(end - time.monotonic(), 1.0)
                until = until or time.monotonic() + reconnect_s
                if not _may_pass(error) or time.monotonic() + wait_s > until:
                    raise
                await self._client._sleep(wait_s)
            else:
                self._may_have_given |= bool(batch.groups)
                return batch

    @contextmanager
    def _key(self) -> Iterator[str]:
        """The key of a batch. It is used again if the batch does not come."""
        key = self._keys.pop(0) if self._keys else feed_calls.new_key("batch")
        try:
            yield key
        except BaseException as error:
            if getattr(error, "status", None) not in FORGOTTEN:
                self._keys.append(key)
            raise

    async def batches(
        self, timeout_s: float = DEFAULT_TIMEOUT_S, reconnect_s: float = RECONNECT_S
    ) -> AsyncGenerator[FeedBatch, None]:
        """Yield batches until every prompt that was put has come back. The last batch may be smaller.

        Prompts may be put meanwhile. If prompts have not come back since the batch before the end, a warning says so.

        Raises: RolloutError, as `batch` does, and if prompts were put of which no group ever came.
        """
        while (batch := await self.batch(drain=True, timeout_s=timeout_s, reconnect_s=reconnect_s)).groups:
            yield batch
        lost = _lost(batch)
        if lost and not self._may_have_given and not batch.meter.trained.num_groups:
            raise RolloutError(None, f"feed {self.id!r} gave no group. {lost}", "NoGroups")
        if lost or batch.warnings:
            warnings.warn(" ".join([f"feed {self.id!r} has ended. {lost}".strip(), *batch.warnings]), stacklevel=2)

    async def delete(self) -> None:
        """Delete the feed, and stop its groups. Raises: RolloutError (404)."""
        await self._client.send(feed_calls.delete_feed(self.id))
        self._keys.clear()

    def __aiter__(self) -> AsyncIterator[FeedBatch]:
        return self.batches()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        try:
            await self.delete()
        except RolloutError as error:
            is_gone = error.status in (None, HTTPStatus.NOT_FOUND)  # deleted before, or with its server
            if not is_gone and not any(exception):
                warnings.warn(f"feed {self.id!r} is there still. Call delete() again: {error}", stacklevel=2)


def _may_pass(error: RolloutError) -> bool:
    """True if the server was lost, or asks for another attempt."""
    return error.type in LOST or error.status in ENDING or error.retry_after_s is not None


def _lost(batch: FeedBatch) -> str:
    """Numbers of prompts that did not come back. Empty if all did."""
    nums = {"failed": len(batch.failed), "filtered": len(batch.filtered), "dropped": len(batch.dropped)}
    if not any(nums.values()):
        return ""
    told = f"Prompts since the batch before: {', '.join(f'{num} {fate}' for fate, num in nums.items())}."
    if batch.dropped:
        told += " Dropped ones became too old: raise max_staleness, or give weights once per batch."
    return told + (f" The first one failed because {batch.failed[0].reason}" if batch.failed else "")


class Feed(Blocked):
    """A feed of a `RolloutClient`. Use as a context manager, and iterate over its batches."""

    refresh = blocking(AsyncFeed.refresh)
    put = blocking(AsyncFeed.put)
    batch = blocking(AsyncFeed.batch)
    batches = blocking_generator(AsyncFeed.batches)
    delete = blocking(AsyncFeed.delete)
    __repr__ = AsyncFeed.__repr__
    _awaited: AsyncFeed

    def __init__(self, feed: AsyncFeed, finish: Callable[[Any], Any] = finished) -> None:
        """`finish`: runs a coroutine and returns its result."""
        self._awaited, self._finish = feed, finish
        self.id = feed.id

    @property
    def info(self) -> FeedAnswer:
        """The feed as last read from the server."""
        return self._awaited.info

    def __iter__(self) -> Iterator[FeedBatch]:
        return self.batches()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._finish(self._awaited.__aexit__(*exception))

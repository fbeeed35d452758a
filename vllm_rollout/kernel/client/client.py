"""The clients of a race: rollouts, rewards and health. `vllm_rollout/client.py` adds the methods of parts.

`calls.py` describes requests and the reading of answers. `sender.py` sends them. The sync client is the async client
over a transport that blocks (`blocking.py`).

Invariant: importing this needs neither vllm nor torch.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any, Self

import httpx

from vllm_rollout.kernel.client import calls
from vllm_rollout.kernel.client.blocking import Blocked, BlockingTransport, blocking, blocking_generator, finished
from vllm_rollout.kernel.client.connection import HEALTH_TIMEOUT_S, LIMITS, POLL_INTERVAL_S, is_healthy
from vllm_rollout.kernel.client.methods import async_streamed, awaited
from vllm_rollout.kernel.client.sender import Sender


class AsyncClient(Sender):
    """Async client of a server."""

    rollout = awaited(calls.rollout)
    stream = async_streamed(calls.stream)
    models = awaited(calls.models)
    post_rewards = awaited(calls.post_rewards)
    post_named_rewards = awaited(calls.post_named_rewards)

    async def health(self) -> bool:
        """True if the server answers and its engine is alive. False without an answer or while the server starts."""
        try:
            response = await self._http.get("/health", timeout=HEALTH_TIMEOUT_S)
        except httpx.TransportError:
            return False
        return is_healthy(response)

    async def wait_until_ready(self, timeout_s: float = 600.0) -> None:
        """Wait until `health()` is True. Raises: TimeoutError after `timeout_s` seconds. RolloutError for other
        answers.
        """
        deadline = time.monotonic() + timeout_s
        while not await self.health():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(
                    f"{self.base_url} was not ready within {timeout_s} s. See the server's log, or wait longer."
                )
            await self._sleep(min(POLL_INTERVAL_S, left_s))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class Client(Blocked):
    """Sync client of a server, around an async client."""

    rollout = blocking(AsyncClient.rollout)
    stream = blocking_generator(AsyncClient.stream)
    models = blocking(AsyncClient.models)
    post_rewards = blocking(AsyncClient.post_rewards)
    post_named_rewards = blocking(AsyncClient.post_named_rewards)
    health = blocking(AsyncClient.health)
    wait_until_ready = blocking(AsyncClient.wait_until_ready)

    def __init__(self, client: AsyncClient, loop: Any = None) -> None:
        """`client`: a client whose coroutines never wait. Or any other, whose coroutines `loop.finished` runs. Then
        `loop.close` is called at the end."""
        self._awaited, self._loop = client, loop
        self._finish: Callable[[Any], Any] = finished if loop is None else loop.finished
        self.base_url, self.key_headers = client.base_url, client.key_headers

    def close(self) -> None:
        if self._loop is None:
            self._finish(self._awaited.close())
        elif self._finish is not finished:
            self._finish(self._awaited.close())
            self._loop.close()
            self._finish = finished

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class BlockingSender(Sender):
    """Sends by blocking, so that coroutines never wait. Overrides: __init__, _sleep, _aside."""

    def __init__(self, *args: Any, transport: Any = None, **settings: Any) -> None:
        http = httpx.Client(limits=LIMITS, transport=transport)
        super().__init__(*args, transport=BlockingTransport(http), **settings)

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def _aside(self, work: Callable[[], object]) -> None:
        if inspect.iscoroutine(returned := work()):
            returned.close()
            raise TypeError("an async function needs the client that is asynchronous, too: AsyncRolloutClient")

"""A run as trainers use it: `for round in run.rounds(prompts)`. Invariant: a round is asked for until it is answered.

A round has a key, under which the server gives the same answer however often it is asked; so a lost connection, a
server that is started again or an answer that never came cost time and no prompt.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from typing_extensions import Unpack

from vllm_rollout.client import run_calls
from vllm_rollout.client.body import PromptLike, takes_options
from vllm_rollout.client.calls import Call, EventsCall
from vllm_rollout.client.connection import POLL_INTERVAL_S, RolloutError
from vllm_rollout.client.run_calls import RoundOptions
from vllm_rollout.client.run_feed import Fed, RoundFeed
from vllm_rollout.server.answers import Event, RoundAnswer
from vllm_rollout.server.runs.answers import RunAnswer
from vllm_rollout.server.runs.body import RoundRequest

T = TypeVar("T")

PATIENCE_S = 600.0
"""How long a round is asked for again when the server does not answer: as long as a large one takes to start."""


class _Patience:
    """Until when a round is asked for again."""

    def __init__(self, patience_s: float) -> None:
        self._until = time.monotonic() + patience_s

    def wait_s(self, error: RolloutError) -> float:
        """Seconds until the next attempt. Raises: the error, where another attempt would end alike, or too late."""
        is_passing = error.status in (None, HTTPStatus.SERVICE_UNAVAILABLE) or error.retry_after_s is not None
        if not is_passing or time.monotonic() >= self._until:
            raise error
        return error.retry_after_s or POLL_INTERVAL_S


class Sender(Protocol):
    """As much of a `RolloutClient` as a run needs."""

    def send(self, call: Call[T]) -> T: ...

    def _events(self, call: EventsCall) -> Generator[Event, None, None]: ...


class AsyncSender(Protocol):
    """As much of an `AsyncRolloutClient` as a run needs."""

    async def send(self, call: Call[T]) -> T: ...

    def _events(self, call: EventsCall) -> AsyncGenerator[Event, None]: ...


class _Run:
    """What both have: the run as it was last seen."""

    def __init__(self, answer: RunAnswer) -> None:
        self.id = answer.id
        self.info = answer
        """As it was made, or last looked at."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, next_round={self.info.next_round!r})"

    def _feed(self, prompts: Iterable[PromptLike]) -> RoundFeed:
        if isinstance(prompts, str | dict):
            raise TypeError(f"prompts must be an iterable of prompts, got one {type(prompts).__name__}")
        return RoundFeed(prompts, self.info.prompts_per_round)


def new_key() -> str:
    return f"round-{uuid.uuid4().hex}"


def _is_refused(error: RolloutError) -> bool:
    """What was handed in is not what the run wants; if its rounds went on meanwhile, another trainer's came between."""
    return error.status in (HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY)


class Run(_Run):
    """A run of a `RolloutClient`."""

    def __init__(self, client: Sender, answer: RunAnswer) -> None:
        super().__init__(answer)
        self._client = client

    def refresh(self) -> RunAnswer:
        """The run as it is now. Raises: RolloutError (404)."""
        self.info = self._client.send(run_calls.run(self.id))
        return self.info

    @takes_options(RoundOptions, RoundRequest)
    def round(
        self,
        prompts: Iterable[PromptLike] = (),
        *,
        key: str | None = None,
        reserve: Iterable[PromptLike] = (),
        timeout: float | None = None,
        patience_s: float = PATIENCE_S,
        **options: Unpack[RoundOptions],
    ) -> RoundAnswer:
        """One round: as many `prompts` as `info.num_fresh_prompts` says, none for a long one.

        key: your name for the round; asked for again it gives the same answer. None: one is made.
        reserve: prompts to run in place of filtered ones.
        patience_s: how long to ask again while the server does not answer.

        Raises: RolloutError.
        """
        call = run_calls.round(self.id, prompts, key=key or new_key(), reserve=reserve, timeout=timeout, **options)
        patience = _Patience(patience_s)
        while True:
            try:
                return self._client.send(call)
            except RolloutError as error:
                time.sleep(patience.wait_s(error))

    @takes_options(RoundOptions, RoundRequest)
    def stream(
        self,
        prompts: Iterable[PromptLike] = (),
        *,
        key: str | None = None,
        reserve: Iterable[PromptLike] = (),
        stream_tokens: int | None = None,
        timeout: float | None = None,
        **options: Unpack[RoundOptions],
    ) -> Generator[Event, None, None]:
        """Like `round`, as events: `round` first, `deferred` and `filtered` among those of a rollout, `done` last.

        What was sent of a prompt that is deferred or filtered counts for nothing. A stream that is cut can be asked for
        again under its key, which the `round` event says: it begins anew. Raises: RolloutError.
        """
        yield from self._client._events(
            run_calls.stream_round(
                self.id,
                prompts,
                key=key or new_key(),
                reserve=reserve,
                stream_tokens=stream_tokens,
                timeout=timeout,
                **options,
            )
        )

    def rounds(
        self, prompts: Iterable[PromptLike], *, epoch: int | None = None, **options: Any
    ) -> Iterator[RoundAnswer]:
        """Rounds over all of `prompts`, short and long as the run says, until each of them is back.

        A prompt without an id gets one made of what it says. A round that was interrupted earlier, by a crash of server
        or trainer, comes first. Several trainers may do this with one run: each gets rounds of all that was handed in.
        Options: as of `round`.
        """
        feed = self._feed(prompts)
        run = self.refresh()
        if run.open_round is not None and run.open_round.state == "interrupted":
            yield self.round(key=run.open_round.idempotency_key, **options)
            run = self.refresh()
        while (fed := feed.next(run, len(run.queue) + len(run.unstarted))) is not None:
            try:
                answer = self.round(fed.prompts, kind=fed.kind, epoch=epoch, **options)
            except RolloutError as error:
                before, run = run, self.refresh()
                if not _is_refused(error) or run.num_rounds == before.num_rounds:
                    raise
                feed.put_back(fed)
                continue
            yield answer
            run = self.refresh()

    def give_up(self, number: int) -> RunAnswer:
        """Put the prompts of an interrupted round back. Raises: RolloutError (404; 409 while it runs)."""
        self.info = self._client.send(run_calls.give_up_round(self.id, number))
        return self.info

    def delete(self) -> None:
        """Forget the run and the prompts that wait in it. Raises: RolloutError (404; 409 while a round runs)."""
        self._client.send(run_calls.delete_run(self.id))


class AsyncRun(_Run):
    """A run of an `AsyncRolloutClient`; its methods are those of `Run`."""

    def __init__(self, client: AsyncSender, answer: RunAnswer) -> None:
        super().__init__(answer)
        self._client = client

    async def refresh(self) -> RunAnswer:
        self.info = await self._client.send(run_calls.run(self.id))
        return self.info

    @takes_options(RoundOptions, RoundRequest)
    async def round(
        self,
        prompts: Iterable[PromptLike] = (),
        *,
        key: str | None = None,
        reserve: Iterable[PromptLike] = (),
        timeout: float | None = None,
        patience_s: float = PATIENCE_S,
        **options: Unpack[RoundOptions],
    ) -> RoundAnswer:
        call = run_calls.round(self.id, prompts, key=key or new_key(), reserve=reserve, timeout=timeout, **options)
        patience = _Patience(patience_s)
        while True:
            try:
                return await self._client.send(call)
            except RolloutError as error:
                await asyncio.sleep(patience.wait_s(error))

    @takes_options(RoundOptions, RoundRequest)
    async def stream(
        self,
        prompts: Iterable[PromptLike] = (),
        *,
        key: str | None = None,
        reserve: Iterable[PromptLike] = (),
        stream_tokens: int | None = None,
        timeout: float | None = None,
        **options: Unpack[RoundOptions],
    ) -> AsyncGenerator[Event, None]:
        call = run_calls.stream_round(
            self.id,
            prompts,
            key=key or new_key(),
            reserve=reserve,
            stream_tokens=stream_tokens,
            timeout=timeout,
            **options,
        )
        async for event in self._client._events(call):
            yield event

    async def rounds(
        self, prompts: Iterable[PromptLike], *, epoch: int | None = None, **options: Any
    ) -> AsyncIterator[RoundAnswer]:
        feed = self._feed(prompts)
        run = await self.refresh()
        if run.open_round is not None and run.open_round.state == "interrupted":
            yield await self.round(key=run.open_round.idempotency_key, **options)
            run = await self.refresh()
        while (fed := feed.next(run, len(run.queue) + len(run.unstarted))) is not None:
            try:
                answer = await self.round(fed.prompts, kind=fed.kind, epoch=epoch, **options)
            except RolloutError as error:
                before, run = run, await self.refresh()
                if not _is_refused(error) or run.num_rounds == before.num_rounds:
                    raise
                feed.put_back(fed)
                continue
            yield answer
            run = await self.refresh()

    async def give_up(self, number: int) -> RunAnswer:
        self.info = await self._client.send(run_calls.give_up_round(self.id, number))
        return self.info

    async def delete(self) -> None:
        await self._client.send(run_calls.delete_run(self.id))


for _name in ("refresh", "round", "stream", "rounds", "give_up", "delete"):
    getattr(AsyncRun, _name).__doc__ = getattr(Run, _name).__doc__

__all__ = ["AsyncRun", "Fed", "Run", "new_key"]

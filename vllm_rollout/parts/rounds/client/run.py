"""A run as trainers use it: `for round in run.rounds(prompts)`. Invariant: a round is asked for until it is answered.

A round has a key. The server gives the same answer for the same key, however often it is asked. So a lost connection, a
restarted server or a lost answer cost time and no prompt.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from typing_extensions import Unpack

from vllm_rollout.kernel.client.blocking import Blocked, blocking, blocking_generator, finished
from vllm_rollout.kernel.client.body import PromptLike, prompt_body, takes_options
from vllm_rollout.kernel.client.connection import POLL_INTERVAL_S, RolloutError
from vllm_rollout.kernel.client.sender import Sender
from vllm_rollout.kernel.http.answers import Event
from vllm_rollout.kernel.parts import faces
from vllm_rollout.parts.rounds.client import run_calls
from vllm_rollout.parts.rounds.client.run_calls import PATIENCE_S, RoundOptions, new_key
from vllm_rollout.parts.rounds.http.answers import RoundAnswer, RunAnswer
from vllm_rollout.parts.rounds.http.body import RoundRequest
from vllm_rollout.parts.rounds.rules.fields import RoundKind

T = TypeVar("T")

LASTED_S = 120.0
"""Seconds. If an attempt lasted longer, the server was there: failed attempts to connect are shorter."""
ENDS_ALIKE = ("UnexpectedAnswer", "ReadTimeout")
"""Types of errors that another attempt would repeat: an unreadable answer, or a time-out set by the caller."""


class _Patience:
    """Time limit for repeating a request for a round."""

    def __init__(self, patience_s: float) -> None:
        self._until = time.monotonic() + patience_s

    def wait_s(self, error: RolloutError) -> float:
        """Seconds until the next attempt. Raises: `error`, if another attempt would fail too, or the time is over."""
        is_passing = error.status in (None, HTTPStatus.SERVICE_UNAVAILABLE) or error.retry_after_s is not None
        is_passing &= error.type not in ENDS_ALIKE
        if not is_passing or time.monotonic() >= self._until:
            raise error
        return error.retry_after_s or POLL_INTERVAL_S


class Fed(NamedTuple):
    """Prompts and kind for the next round."""

    prompts: list[PromptLike]
    kind: RoundKind | None


class RoundFeed:
    """Prompts of one pass over the data, in portions for rounds. At the end, waiting prompts run in long rounds.

    Invariant: each prompt is handed in once.
    """

    def __init__(self, prompts: Iterable[PromptLike], prompts_per_round: int) -> None:
        self._prompts = _named(prompts)
        self._prompts_per_round = prompts_per_round

    def next(self, run: RunAnswer) -> Fed | None:
        """Prompts for the next round of the run as it is now. None once every prompt was handed in and came back."""
        if run.next_round == "long":
            return Fed([], None)
        fresh = list(islice(self._prompts, run.num_fresh_prompts))
        num_waiting = len(run.queue) + len(run.unstarted)
        if len(fresh) == run.num_fresh_prompts and (fresh or num_waiting):
            return Fed(fresh, None)
        if not fresh and not num_waiting:
            return None
        rest = fresh[self._prompts_per_round :]
        self.put_back(Fed(rest, None))
        return Fed(fresh[: self._prompts_per_round], "long")

    def put_back(self, fed: Fed) -> None:
        """Return prompts that were not handed in. They come next."""
        self._prompts = chain(fed.prompts, self._prompts)


def _named(prompts: Iterable[PromptLike]) -> Iterator[PromptLike]:
    """Prompts with ids. Equal prompts without an id get `…-2`, `…-3`, the same in every pass."""
    times: Counter[str] = Counter()
    for position, prompt in enumerate(prompts):
        given = prompt_body(prompt, position)
        body = run_calls.named(given, position)
        if given.get("id") is None:
            times[body["id"]] += 1
            if (number := times[body["id"]]) > 1:
                body["id"] += f"-{number}"
        yield body


def _is_refused(error: RolloutError) -> bool:
    """True if the server refused the prompts, for example because another trainer's round came in between."""
    return error.status in (HTTPStatus.CONFLICT, HTTPStatus.BAD_REQUEST)


if TYPE_CHECKING:
    from vllm_rollout import RunMethods
else:
    RunMethods = type("RunMethods", tuple(methods for _, methods in faces("run_methods")), {})
    """Methods of runs that need another part."""


class AsyncRun(RunMethods):
    """A run of an `AsyncRolloutClient`: rounds of prompts with a queue at the server."""

    def __init__(self, client: Sender, answer: RunAnswer) -> None:
        self._client = client
        self.id = answer.id
        self.info = answer
        """The run as last read from the server."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, next_round={self.info.next_round!r})"

    async def refresh(self) -> RunAnswer:
        """Read the run from the server. Raises: RolloutError (404)."""
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
        """Play one round. Pass `info.num_fresh_prompts` prompts, or none for a long round.

        key: your name for the round. A second call with the same key gives the same answer. None: a new key.
        reserve: prompts that replace filtered prompts.
        timeout: longest silence of the server in seconds.
        patience_s: seconds for which to ask again while the server does not answer.

        Raises: RolloutError.
        """
        call = run_calls.round(self.id, prompts, key=key or new_key(), reserve=reserve, timeout=timeout, **options)
        return await self._patiently(partial(self._client.send, call), patience_s)

    async def _patiently(self, ask: Callable[[], Awaitable[T]], patience_s: float) -> T:
        """Call `ask` again while the server does not answer. Raises: RolloutError."""
        patience = _Patience(patience_s)
        while True:
            began = time.monotonic()
            try:
                return await ask()
            except RolloutError as error:
                if error.status == HTTPStatus.CONFLICT or time.monotonic() - began > LASTED_S:
                    patience = _Patience(patience_s)  # the server answers: another round runs, or it ran this one
                await self._client._sleep(patience.wait_s(error))

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
        """Like `round`, as events: `round` first, `deferred` and `filtered` among those of a rollout, `done` last.

        Drop the earlier events of a prompt that is deferred or filtered. A stream that was cut can be asked for again:
        pass the key from its `round` event. It then starts from its beginning.

        Raises: RolloutError.
        """
        call = run_calls.stream_round(
            self.id,
            prompts,
            key=key or new_key(),
            reserve=reserve,
            stream_tokens=stream_tokens,
            timeout=timeout,
            **options,
        )
        async with aclosing(self._client._events(call)) as events:
            async for event in events:
                yield event

    async def rounds(
        self, /, prompts: Iterable[PromptLike], *, epoch: int | None = None, **options: Any
    ) -> AsyncGenerator[RoundAnswer, None]:
        """Play rounds over all of `prompts`, short and long as the run requires, until every prompt has come back.

        A prompt without an id gets one made from its content. A round that a crash of server or trainer interrupted
        comes first. Several trainers may share one run: each gets rounds of all prompts that were handed in.

        Options: as of `round`. Raises: RolloutError. TypeError for a single prompt.
        """
        waits = {name: options[name] for name in ("timeout", "patience_s") if name in options}

        async def play(prompts: Iterable[PromptLike] = (), *, key: str | None = None, **fed: Any) -> RoundAnswer:
            if key is not None:  # the server has the options of a round that was asked for before
                return await self.round(key=key, **waits)
            return await self.round(prompts, **fed, **options)

        async with aclosing(self._rounds(prompts, epoch, play)) as rounds:
            async for answer in rounds:
                yield answer

    async def _rounds(
        self, prompts: Iterable[PromptLike], epoch: int | None, play: Callable[..., Awaitable[T]]
    ) -> AsyncGenerator[T, None]:
        """Yield the result of `play` for each round. `play` takes arguments of `round`."""
        if isinstance(prompts, str | dict):
            raise TypeError(f"prompts must be an iterable of prompts, got one {type(prompts).__name__}")
        feed = RoundFeed(prompts, self.info.prompts_per_round)
        run = await self.refresh()
        if run.open_round is not None and run.open_round.state == "interrupted":
            yield await play(key=run.open_round.idempotency_key)
            run = await self.refresh()
        while (fed := feed.next(run)) is not None:
            try:
                answer = await play(fed.prompts, kind=fed.kind, epoch=epoch)
            except RolloutError as error:
                before, run = run, await self.refresh()
                if not _is_refused(error) or run.num_rounds == before.num_rounds:
                    raise
                feed.put_back(fed)
                continue
            yield answer
            run = await self.refresh()

    async def give_up(self, number: int) -> RunAnswer:
        """Put the prompts of an interrupted round back into the queue. Raises: RolloutError (404, or 409 while it
        runs).
        """
        self.info = await self._client.send(run_calls.give_up_round(self.id, number))
        return self.info

    async def delete(self) -> None:
        """Delete the run and the prompts that wait in it. Raises: RolloutError (404, or 409 while a round runs)."""
        await self._client.send(run_calls.delete_run(self.id))


class Run(Blocked):
    """A run of a `RolloutClient`: rounds of prompts with a queue at the server."""

    refresh = blocking(AsyncRun.refresh)
    round = blocking(AsyncRun.round)
    stream = blocking_generator(AsyncRun.stream)
    rounds = blocking_generator(AsyncRun.rounds)
    give_up = blocking(AsyncRun.give_up)
    delete = blocking(AsyncRun.delete)
    __repr__ = AsyncRun.__repr__
    _awaited: AsyncRun

    def __init__(self, run: AsyncRun, finish: Callable[[Any], Any] = finished) -> None:
        """`finish`: runs a coroutine and returns its result."""
        self._awaited, self._finish = run, finish
        self.id = run.id

    @property
    def info(self) -> RunAnswer:
        """The run as last read from the server."""
        return self._awaited.info

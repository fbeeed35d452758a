"""Calls from an API process to its engine cores, by the call table.

Invariant: a dead engine is an EngineStopped (503).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from vllm.config import VllmConfig
from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_rollout.background import begin, heard
from vllm_rollout.kernel.call_table import CALL_METHOD, Argument, Operation, Result
from vllm_rollout.kernel.http.engine import EngineStopped, RequestError

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

LOOK_S = 1.0
"""Seconds between two checks whether the engine is alive, while a call waits for its answer."""


class RankDied(GracefulHTTPError):
    """The rank died, and the request or call to it is lost. The server goes on."""

    rank: int
    request_id: str | None
    """Id of the request that was not sent, if any."""

    @classmethod
    def of(cls, rank: int, request_id: str | None = None) -> RankDied:
        died = cls(
            f"rank {rank} of the engine has died, and what ran there is lost. Send it again: other ranks go on. "
            "The server's log says why it died.",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )
        died.rank, died.request_id = rank, request_id
        return died


class CalledClient(Protocol):
    """The part of an engine client that calls need."""

    vllm_config: VllmConfig
    engine_core: Any
    """vLLM's client of the engine cores."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def living_ranks(self) -> Sequence[int]: ...

    @property
    def errored(self) -> bool: ...


class CalledCores:
    """Engine cores without an engine client of ours, as the part of a client that calls need."""

    def __init__(self, engine_core: Any, vllm_config: VllmConfig, num_ranks: int = 1) -> None:
        self.engine_core, self.vllm_config, self.num_ranks = engine_core, vllm_config, num_ranks
        self.living_ranks = range(num_ranks)

    @property
    def errored(self) -> bool:
        return bool(self.engine_core.resources.engine_dead)


class EngineCalls:
    """Implements `kernel.http.engine.CoreCalls` through one engine client."""

    def __init__(self, client: CalledClient) -> None:
        self._client = client
        self.after_change: Callable[[], None] = lambda: None
        """Called after training and after new lengths: there is new state to save."""
        self.none_moves = asyncio.Lock()
        """Held while a group is in no engine core, while ranks are held or restored, and by calls that must reach all
        groups.
        """
        self._turn_of: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One lock per rank: calls run one at a time, so that no two of them run between the same two steps."""
        self._running: set[asyncio.Task[Any]] = set()

    @property
    def num_ranks(self) -> int:
        return self._client.num_ranks

    @property
    def vllm_config(self) -> VllmConfig:
        """The configuration of the current engine."""
        return self._client.vllm_config

    @property
    def living_ranks(self) -> Sequence[int]:
        return self._client.living_ranks

    @property
    def is_busy(self) -> bool:
        """True while several calls belong together: an engine must get all of them or none."""
        return bool(self._running)

    async def call_rank(self, rank: int, operation: Operation[Argument, Result], argument: Argument) -> Result:
        """Run one operation on one rank of this API process. Raises: EngineStopped if the rank is dead."""
        payload = operation.encode_argument(argument)
        try:
            async with self._turn_of[rank]:
                core = self._client.engine_core  # read here: the engine may have been rebuilt during the wait
                answer = await self.unless_dead(
                    core._call_utility_async(CALL_METHOD, operation.name, payload, engine=core.core_engines[rank])
                )
        except RankDied as error:
            raise EngineStopped(str(error), status=error.http_status) from error
        except EngineDeadError as error:
            raise engine_stopped() from error
        return operation.decode_result(answer)

    async def call_first(self, operation: Operation[Argument, Result], argument: Argument) -> Result:
        """Run one operation on the first living rank, which trains, and has all data that every rank has."""
        return await self.ask_first(lambda rank: self.call_rank(rank, operation, argument))

    async def ask_first(self, ask: Callable[[int], Awaitable[Value]]) -> Value:
        """Call `ask` for the first living rank, and for the next one if that rank dies meanwhile."""
        while True:
            rank = next(iter(self.living_ranks), 0)
            try:
                return await ask(rank)
            except EngineStopped:
                if rank in self.living_ranks or not self.living_ranks:
                    raise

    async def call_each(self, operation: Operation[Argument, Result], argument: Argument) -> dict[int, Result]:
        """Run one operation on every rank. Returns the results of living ranks by rank, in order."""
        payload = operation.encode_argument(argument)
        core = self._client.engine_core
        calls = {
            rank: core._call_utility_async(CALL_METHOD, operation.name, payload, engine=core.core_engines[rank])
            for rank in self.living_ranks
        }
        try:
            answers = await self.unless_dead(answers_of_the_living(calls))
        except EngineDeadError as error:
            raise engine_stopped() from error
        return {rank: operation.decode_result(answer) for rank, answer in answers.items()}

    async def call_all(self, operation: Operation[Argument, Result], argument: Argument) -> list[Result]:
        """Results of `call_each` as a list, without ranks."""
        return list((await self.call_each(operation, argument)).values())

    async def tell_groups(self, operation: Operation[Argument, Result], argument: Argument) -> list[Result]:
        """`call_all` while no group moves: it would miss a group that is in no engine core."""
        async with self.none_moves:
            return await self.call_all(operation, argument)

    async def unless_dead(self, call: Awaitable[Value]) -> Value:
        """Await a call. If the engine dies, vLLM would wait for ever: here the call ends.

        Raises: EngineStopped.
        """
        calling = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([calling], timeout=LOOK_S))[0]:
                if self._client.errored:
                    raise engine_stopped()
            return calling.result()
        finally:
            calling.cancel()

    async def to_its_end(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Await work that continues if its caller goes away: half of it would leave ranks different."""
        return await heard(begin(work, self._running), "a call of several ranks", refusals=(RequestError,))


async def answers_of_the_living(calls: Mapping[Key, Awaitable[Value]]) -> dict[Key, Value]:
    """Answers of the calls whose rank is alive to the end. Raises: EngineDeadError if no rank is left."""
    answers = await asyncio.gather(*calls.values(), return_exceptions=True)
    if all(isinstance(answer, RankDied) for answer in answers):
        raise EngineDeadError()
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, RankDied):
            raise answer
    return {key: answer for key, answer in zip(calls, answers, strict=True) if not isinstance(answer, BaseException)}


def engine_stopped() -> EngineStopped:
    """The error for a client if the engine is dead."""
    return EngineStopped(
        "the engine has stopped; restart the server and see its log for the reason.",
        status=HTTPStatus.SERVICE_UNAVAILABLE,
    )

"""vLLM's client of several engine cores, for a server that goes on when one of them dies.

Invariant: nothing is sent to a rank that is known to be dead, and no call waits for one.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import DPLBAsyncMPClient

from vllm_rollout.kernel.api.engine_calls import RankDied, answers_of_the_living
from vllm_rollout.parts.moving.api.deaths import outlives_a_rank

NOTHING = msgspec.msgpack.encode(EngineCoreOutputs())
"""An engine core's message without outputs."""


class RankClient(DPLBAsyncMPClient):
    """Overrides: __init__, _ensure_output_queue_task, _call_utility_async, call_utility_async, call_utility_all_async,
    get_core_engine_for_request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._dead: set[bytes] = set()
        self._deaths: dict[bytes, asyncio.Future[None]] = {}
        """One future per called rank, done when the rank has died."""
        super().__init__(*args, **kwargs)

    def bury(self, rank: int) -> None:
        """Mark a rank as dead. Running and later calls to it end with RankDied."""
        engine = self.core_engines[rank]
        self._dead.add(engine)
        if (death := self._deaths.get(engine)) is not None and not death.done():
            death.set_result(None)

    def requests_of(self, rank: int) -> list[str]:
        """Ids of requests in flight at this rank."""
        engine = self.core_engines[rank]
        return [request_id for request_id, each in self.reqs_in_flight.items() if each == engine]

    def forget(self, request_id: str) -> None:
        """Remove a request that is in no engine core any more."""
        engine = self.reqs_in_flight.pop(request_id, None)
        if engine is not None:
            self.engine_inflight[engine] -= 1

    def _ensure_output_queue_task(self) -> None:
        if outlives_a_rank(self.vllm_config):
            self.resources.validate_alive = self._overhear_last_words  # type: ignore[assignment]
        super()._ensure_output_queue_task()

    @staticmethod
    def _overhear_last_words(frames: list[Any]) -> None:
        """Drop an engine core's message that it failed. It does not name the rank: the end of its process does."""
        if len(frames) == 1 and frames[0].buffer == EngineCoreProc.ENGINE_CORE_DEAD:
            frames[0] = NOTHING

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        rank = self.core_engines.index(engine)
        if engine in self._dead:
            raise RankDied.of(rank)
        if (death := self._deaths.get(engine)) is None:
            death = self._deaths[engine] = asyncio.get_running_loop().create_future()
        call = asyncio.ensure_future(super()._call_utility_async(method, *args, engine=engine))
        try:
            await asyncio.wait([call, death], return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise RankDied.of(rank)
            return call.result()
        finally:
            call.cancel()

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        """Answers of living ranks, in the order of ranks."""
        calls = {engine: self._call_utility_async(method, *args, engine=engine) for engine in self.core_engines}
        return list((await answers_of_the_living(calls)).values())

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        return (await self.call_utility_all_async(method, *args))[0]

    def get_core_engine_for_request(self, request: Any) -> bytes:
        engine = super().get_core_engine_for_request(request)
        if engine in self._dead:
            self.forget(request.request_id)
            raise RankDied.of(self.core_engines.index(engine), request.request_id)
        return engine

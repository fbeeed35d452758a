"""An engine at another tensor-parallel size behind the same engine client. vLLM's engine cores are stopped and new ones
started, while requests wait.

Invariant: no request or call fails because of it. It is answered by the old engine, or waits for the new one. The
learned state is the same before and after.
"""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import Sequence
from inspect import iscoroutinefunction
from types import SimpleNamespace
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.logger import init_logger
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.abstract import Executor

from vllm_rollout.kernel.api.client import UNNAMED_WEIGHTS, RolloutAsyncLLM
from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.kernel.api.engine_calls import CalledCores, EngineCalls, engine_stopped
from vllm_rollout.kernel.parts import faces
from vllm_rollout.parts.rounds.with_shaping.api.lost_weights import LostWeights
from vllm_rollout.parts.rounds.with_shaping.http.parallelism import Resized
from vllm_rollout.parts.shaping.api.lengths import EngineShaping

logger = init_logger("vllm.vllm_rollout")

LOOK_S = 0.02
"""Seconds between two checks whether the engine is empty."""
CALLS_TIMEOUT_S = 60.0
"""Seconds. If the engine has not answered a call by then, it is not rebuilt now."""


class ClosedEngine:
    """Replaces vLLM's engine core client while there is no engine. Calls of its coroutines wait for the next engine.

    Other attributes are those of the client before.
    """

    def __init__(self, before: AsyncMPClient) -> None:
        self._before = before
        self._next: asyncio.Future[AsyncMPClient] = asyncio.get_running_loop().create_future()
        self.resources = SimpleNamespace(engine_dead=False)
        self.is_stopping = False
        """True once the server ends. An engine that has just been built is then shut down."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._before, name)
        if not iscoroutinefunction(found):
            return found

        async def wait_and_ask(*args: Any, **kwargs: Any) -> Any:
            return await getattr(await asyncio.shield(self._next), name)(*args, **kwargs)

        return wait_and_ask

    def give_way(self, to: AsyncMPClient) -> None:
        self._next.set_result(to)

    def die(self) -> None:
        self.resources.engine_dead = True
        self._next.set_exception(EngineDeadError())
        self._next.exception()  # read here, because it may not be awaited

    def shutdown(self, timeout: float | None = None) -> None:
        self.is_stopping = True


def config_of(args: Namespace, size: int) -> VllmConfig:
    """The server's configuration at another tensor-parallel size, with all values that vLLM derives."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    engine_args.tensor_parallel_size = size
    config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    for _, take_over in faces("next_engine"):
        take_over(config)
    return config


def start_engine(config: VllmConfig, closed: ClosedEngine, log_stats: bool) -> AsyncMPClient:
    """Start engine cores as AsyncLLM does. Returns when they are ready, after seconds to minutes. Call this on a
    thread.
    """
    core = EngineCoreClient.make_async_mp_client(
        vllm_config=config, executor_class=Executor.get_class(config), log_stats=log_stats
    )
    if closed.is_stopping:  # no other code would stop it
        core.shutdown()
    return core


class Resizer:
    """Rebuilds the service's engine at another tensor-parallel size, for `Parallelism`."""

    def __init__(self, client: RolloutAsyncLLM, engine: VLLMEngine, args: Namespace) -> None:
        self._client = client
        self._engine = engine
        self._args = args
        self.lost = LostWeights(client)

    @property
    def tensor_parallel_size(self) -> int:
        return self._client.vllm_config.parallel_config.tensor_parallel_size

    async def resize(self, size: int, patience_s: float) -> Resized:
        """Rebuild the engine once nothing runs in it, within `patience_s` seconds. Requests that come meanwhile wait.

        Raises: RequestError (503) if the engine starts neither at `size` nor at the size it had. The engine is then
        dead.
        """
        started = time.monotonic()
        before = self.tensor_parallel_size
        self._client.door.shut()
        try:
            if not await self._is_empty(started + patience_s):
                return Resized("busy", before, 0.0)
            logger.info("vllm_rollout: rebuilding the engine with tensor-parallel size %d; requests wait", size)
            await self._swap(size)
            await self._engine.part(EngineShaping).use_costs(self._args)
        except TimeoutError:
            return Resized("busy", before, 0.0)
        except EngineDeadError as error:
            raise engine_stopped() from error
        finally:
            self._client.door.open()
        seconds = time.monotonic() - started
        if self.tensor_parallel_size != size:
            return Resized("failed", before, seconds)
        logger.info("vllm_rollout: the engine went from tensor-parallel size %d to %d in %.1f s", before, size, seconds)
        return Resized("rebuilt", size, seconds)

    async def _is_empty(self, deadline: float) -> bool:
        """Wait until nothing is in the engine. False if it is paused or asleep, or still busy at the deadline."""
        client, unless_dead = self._client, self._engine.calls.unless_dead
        if await unless_dead(client.is_paused()) or await unless_dead(client.is_sleeping()):
            return False
        while client.get_num_unfinished_requests() or client.door.num_inside or self._engine.is_busy:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    async def _swap(self, size: int) -> None:
        client, core, config = self._client, self._client.engine_core, self._client.vllm_config
        client.engine_core = closed = ClosedEngine(core)
        try:
            async with asyncio.timeout(CALLS_TIMEOUT_S):
                await _calls_answered(core)
            calls = EngineCalls(CalledCores(core, config))
            taken = [(part, await part.take(calls)) for part in self._engine.parts]
            version = await calls.unless_dead(core.get_weight_version_async())
            if version != UNNAMED_WEIGHTS:
                self.lost.version = version
        except BaseException:
            client.engine_core = core
            closed.give_way(core)
            raise
        handler, client.output_handler = client.output_handler, None
        if handler is not None:
            handler.cancel()
            await asyncio.gather(handler, return_exceptions=True)
        try:
            await asyncio.to_thread(core.shutdown)
            core, config = await self._started((size, config.parallel_config.tensor_parallel_size), closed)
            calls = EngineCalls(CalledCores(core, config))
            for part, its in taken:
                await part.put(calls, its)
        except BaseException:
            client.output_handler = handler  # it is done, so vLLM notices that the engine is dead
            closed.die()
            raise
        client.engine_core, client.vllm_config = core, config
        client._run_output_handler()
        closed.give_way(core)
        await client.reset_mm_cache()

    async def _started(self, sizes: Sequence[int], closed: ClosedEngine) -> tuple[AsyncMPClient, VllmConfig]:
        """An engine of the first of these sizes that starts. Raises: RequestError (503) if none does."""
        for size in sizes:
            try:
                config = await asyncio.to_thread(config_of, self._args, size)
                return await asyncio.to_thread(start_engine, config, closed, self._client.log_stats), config
            except (RuntimeError, TimeoutError, ValueError, OSError) as error:
                logger.error("vllm_rollout: no engine of tensor-parallel size %d starts here: %s", size, error)
        raise engine_stopped()


async def _calls_answered(core: AsyncMPClient) -> None:
    """Wait until the engine has answered all calls that were made before its client was replaced."""
    await asyncio.sleep(LOOK_S)  # calls that were made, and have not begun
    while core.utility_results and not core.resources.engine_dead:
        await asyncio.sleep(LOOK_S)

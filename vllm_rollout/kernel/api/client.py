"""vLLM's engine client with groups. All candidates of a group run on one data-parallel rank.

Invariant: a request without our fields takes the base class's path unchanged.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.adapter.output_text import keep_to_output_text
from vllm_rollout.kernel.api.door import Door
from vllm_rollout.kernel.api.engine_calls import EngineCalls, RankDied
from vllm_rollout.kernel.api.group_client import GroupClient
from vllm_rollout.kernel.api.group_routes import GroupRoutes, new_ranks
from vllm_rollout.kernel.api.life import life_of
from vllm_rollout.kernel.call_table import ABORT_REQUESTS
from vllm_rollout.kernel.http.engine import EngineStopped
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.rules.request_names import is_request_id, names_of_request
from vllm_rollout.kernel.wire import CandidateTag

UNNAMED_WEIGHTS = "default"
"""vLLM's weight version until a client names one."""


class RolloutAsyncLLM(GroupClient, AsyncLLM):
    """AsyncLLM that runs groups, over as many ranks as it has.

    Overrides: __init__, generate, add_request, add_lora, abort, shutdown, collective_rpc, pause_generation, sleep,
    update_weight_version, _run_output_handler.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.before_shutdown: Callable[[], None] | None = None
        """Called once, on the thread that stops the engine, while the engine still answers."""
        self.before_weights: Callable[[], Awaitable[None]] | None = None
        """Called before a trainer pauses the engine, lets it sleep or sends it weights."""
        self.after_version: list[Callable[[], Awaitable[None]]] = []
        """Called once the engine has a new name of its weights by a request to this API process."""
        self.door = Door()
        self.when_aborted: Callable[[set[str]], None] = lambda names: None
        """Called with the names of requests that a client aborts, in the process that takes the abort."""
        self.when_all_aborted: Callable[[], None] = lambda: None
        """Called when a client aborts all requests of this process."""
        self.before_rollouts: Callable[[], Awaitable[None]] | None = None
        """Called before a rollout, or a candidate of a group, begins."""
        _fork_engines(kwargs["vllm_config"])
        super().__init__(*args, **kwargs)
        keep_to_output_text(self.output_processor)
        self._candidates: WeakKeyDictionary[RequestOutputCollector, str] = WeakKeyDictionary()
        """Group ids of running candidates. Request ids do not identify candidates: clients may use the same ids for
        other requests.
        """
        # The Rust front end is a client of the engine cores, but knows no groups.
        num_others = int(ServeOptions.of(kwargs["vllm_config"]).beside_rust)
        self.client_index = int(kwargs.get("client_index", 0)) - num_others
        """Number of this API process, from 0."""
        self.num_api_processes = int(kwargs.get("client_count", 1)) - num_others
        # Ties go in turn, and several API processes begin with different ranks.
        ranks = new_ranks(self.num_ranks, self.client_index, alone=self.num_api_processes == 1)
        routes = GroupRoutes(ranks, self.request_counts if self.num_ranks > 1 else None)
        self.begin_groups(routes, Metrics())
        self.life = life_of(self)

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        before, self.before_shutdown = self.before_shutdown, None
        if before is not None:
            before()
        super().shutdown(*args, **kwargs)

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks that this client can choose from."""
        parallel = self.vllm_config.parallel_config
        return parallel.data_parallel_size_local if parallel.local_engines_only else parallel.data_parallel_size

    def request_counts(self) -> list[int]:
        """Requests on each rank, running or waiting, of all clients.

        The count is the coordinator's last report plus the requests that vLLM's balancing has sent since, times the
        number of API processes. It is at least the number of requests that this process has sent.
        """
        core = self.engine_core
        told = zip(core.core_engines, core.lb_engines, strict=True)
        return [max(waiting + running, core.engine_inflight[engine]) for engine, (waiting, running, _) in told]

    @property
    def living_ranks(self) -> Sequence[int]:
        """Ranks of this client that have not died."""
        return self.life.living_ranks

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        if self.routes.held:
            self.routes.check_open(kwargs.get("data_parallel_rank"))
        return super().generate(prompt, sampling_params, request_id, **kwargs)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter. Clears `load_inplace` afterwards, so that its files are not read again for every request."""
        try:
            return await super().add_lora(lora_request)
        finally:
            lora_request.load_inplace = False

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Abort requests. A candidate ends with the scheduler's last output, so that tokens held there are not lost."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        ids = [id for id in ids if internal or is_request_id(id)]
        if internal and isinstance(request_id, list):  # vLLM's /abort_requests without ids; others name one request
            self.when_all_aborted()
        known = self.output_processor.external_req_ids
        named = ids if internal else [internal_id for id in ids for internal_id in known.get(id, ())]
        candidates = [id for id in named if self.group_of(id) is not None]
        if candidates:
            for state in map(self.output_processor.request_states.get, candidates if internal else ()):
                if state is not None and state.external_req_id in self.unread:
                    self.unread[state.external_req_id] = state.queue
            for id in candidates:  # an abort that overtook its candidate would stop nothing
                if (route := self.routes.find(self.group_of(id) or "")) is not None:
                    await route.door.opened()
            await self.engine_core.abort_requests_async(candidates)
            if others := [id for id in named if id not in candidates]:
                await super().abort(others, internal=True)
        else:
            await super().abort(ids, internal)
        if not internal:
            stopped = {*named, *(await self._abort_named(ids) if ids else ())}
            if isinstance(request_id, list):
                request_id[:] = stopped  # vLLM's /abort_requests answers with its length

    async def _abort_named(self, ids: Sequence[str]) -> list[str]:
        """Abort candidates of requests and rollouts by the clients' ids, in all API processes. Returns the candidates'
        internal ids.

        A rollout is aborted by its own API process, which hears of the abort.
        """
        names = set().union(*map(names_of_request, ids))
        self.when_aborted(names)
        return await self.abort_groups(names)

    async def abort_groups(self, names: set[str]) -> list[str]:
        """Abort candidates by these names (`names_of_request`) in all engine cores, once no group of this process is
        between two of them. Again, if one has moved meanwhile. Returns the candidates' internal ids.
        """
        found: dict[str, None] = {}
        for _ in range(2):
            ranks = {}
            for route in list(self.routes.running):
                await route.door.opened()
                ranks[route.group_id] = route, route.rank
            try:
                for ids in await EngineCalls(self).call_all(ABORT_REQUESTS, sorted(names)):
                    found |= dict.fromkeys(ids)
            except EngineStopped:  # a dead engine is reported elsewhere
                break
            if all(route.door.is_open and route.rank == rank for route, rank in ranks.values()):
                break
        return [*found]

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> RequestOutputCollector:
        tag = CandidateTag.of(params.extra_args) if isinstance(params, SamplingParams) else None
        route = None if tag is None else self.routes.find(tag.group_id)  # a profiler's candidates have none
        async with self._passing(tag), nullcontext() if route is None else route.launching() as rank:
            self.life.watch()
            if route is None and self.routes.held:  # vLLM balances these, but does not know of ranks that are held
                pinned_rank = kwargs.get("data_parallel_rank")
                self.routes.check_open(pinned_rank)
                rank = self.routes.next_rank() if pinned_rank is None else pinned_rank
            if rank is not None and self.num_ranks > 1:
                kwargs["data_parallel_rank"] = rank
            try:
                collector = await super().add_request(request_id, prompt, params, *args, **kwargs)
            except RankDied as death:  # vLLM has noted the request already
                self.lose([death.request_id], death)  # type: ignore[list-item]
                raise
        if tag is not None:
            self._candidates[collector] = tag.group_id
        return collector

    @asynccontextmanager
    async def _passing(self, tag: CandidateTag | None) -> AsyncIterator[None]:
        async with self.door.passing():
            if tag is not None and self.before_rollouts is not None:  # one that has not passed may reach another engine
                await self.before_rollouts()
            yield

    def _run_output_handler(self) -> None:
        if self.output_handler is None:
            super()._run_output_handler()
            self.output_handler.add_done_callback(partial(_fail_calls, self.engine_core))

    async def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        await self._weights_come()
        return await super().collective_rpc(*args, **kwargs)

    async def pause_generation(self, *args: Any, **kwargs: Any) -> None:
        await self._weights_come()
        await super().pause_generation(*args, **kwargs)

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        await self._weights_come()
        await super().sleep(*args, **kwargs)

    async def update_weight_version(self, new_version: str) -> None:
        await super().update_weight_version(new_version)
        await self.hear_version()

    async def hear_version(self) -> None:
        """Tell those who want to hear it that weights have a new name."""
        for hear in self.after_version:
            await hear()

    async def _weights_come(self) -> None:
        if self.before_weights is not None:
            await self.before_weights()

    def group_of(self, internal_id: str) -> str | None:
        """Group id of a running candidate."""
        state = self.output_processor.request_states.get(internal_id)
        return None if state is None else self._candidates.get(state.queue)  # type: ignore[arg-type]

    def lose(self, request_ids: Iterable[str], error: Exception) -> None:
        """Fail requests that are in no engine core any more. Readers of their outputs get `error`."""
        for request_id in request_ids:
            self.engine_core.forget(request_id)
            state = self.output_processor.request_states.get(request_id)
            if state is not None:
                self.output_processor.abort_requests([request_id], internal=True)
                state.queue.put(error)


def _fork_engines(vllm_config: VllmConfig) -> None:
    """Make engine cores copies of this process: ten seconds sooner than processes that import vLLM again. Call this
    before this process starts them.

    vLLM makes copies on a GPU. Its CPU platform starts new processes, because OpenMP reads the number of threads when a
    process starts. `kernel/worker/cpu_executor.py` sets that number later.

    A process that has computed with several threads must not be copied: OpenMP would wait for ever for threads that the
    copy does not have. An API process computes only with images and sounds. Engines that are rebuilt while the server
    runs are not copied either (`ServeOptions.forks`).
    """
    if ServeOptions.of(vllm_config).forks and not vllm_config.model_config.is_multimodal_model:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def _fail_calls(engine_core: AsyncMPClient, handler: asyncio.Task[None]) -> None:
    """Fail the running calls of an engine whose outputs are no longer read.

    vLLM leaves such calls without an answer, and the server would wait for their clients before it ends.
    """
    for answer in engine_core.utility_results.values():
        if not answer.done():
            answer.set_exception(EngineDeadError())

"""vLLM's LLMEngine, which steps only when it is called, as the client on which groups run.

Invariant: the engine steps only while an output is awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.tasks import SupportedTask
from vllm.v1.engine.core_client import EngineCoreClient, InprocClient
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_rollout.adapter.output_text import keep_to_output_text
from vllm_rollout.background import begin
from vllm_rollout.kernel.api.door import Door
from vllm_rollout.kernel.api.group_client import GroupClient
from vllm_rollout.kernel.api.group_routes import GroupRoutes
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.rules.ranks import Ranks

TURNS_PER_STEP = 32
"""Turns of the event loop between two steps. Reactions to an output (the next group, an event for a reader) take some.
A turn with nothing to do takes microseconds.
"""


class SteppedCore:
    """Async interface of the engine core behind an LLMEngine. A call blocks the event loop."""

    def __init__(self, core: EngineCoreClient) -> None:
        self._core = core
        self.core_engines = [None]
        """One engine core."""

    async def _call_utility_async(self, method: str, *args: Any, engine: Any) -> Any:
        if isinstance(self._core, InprocClient):
            return getattr(self._core.engine_core, method)(*args)
        return self._core.call_utility(method, *args)


class EngineRequests:
    """Single requests on an LLMEngine."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._waiting: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        """Queues for outputs, by request id."""
        self._unclaimed: list[RequestOutput] = []
        self._stepping: asyncio.Task[None] | None = None

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request. Closing the generator aborts it."""
        internal_id = self._engine.add_request(
            request_id,
            prompt,
            sampling_params,
            lora_request=lora_request,
            trace_headers=trace_headers,
            priority=priority,
        )
        queue = self._waiting[request_id] = asyncio.Queue()
        if self._stepping is None or self._stepping.done():
            self._stepping = begin(self._step_on())
        finished = False
        try:
            while not finished:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                finished = output.finished
                yield output
        finally:
            del self._waiting[request_id]
            if not finished:
                self._engine.abort_request([internal_id], internal=True)

    def take_unclaimed(self) -> list[RequestOutput]:
        """Last outputs of requests that other code has added. They are returned once."""
        unclaimed, self._unclaimed = self._unclaimed, []
        return unclaimed

    def others(self) -> list[str]:
        """Internal ids of requests that other code has added. The `n` parts of a request have one id."""
        known = self._engine.output_processor
        single = [(id, state) for id, state in known.request_states.items() if state.parent_req is None]
        return [*known.parent_requests, *(id for id, state in single if state.external_req_id not in self._waiting)]

    def abort_others(self, but: Collection[str] = ()) -> None:
        """Abort requests that other code has added, and drop their outputs."""
        self._engine.abort_request([id for id in self.others() if id not in but], internal=True)
        self._unclaimed.clear()

    async def _step_on(self) -> None:
        """Step the engine until it has no unfinished requests."""
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    if (queue := self._waiting.get(output.request_id)) is not None:
                        queue.put_nowait(output)  # type: ignore[arg-type]
                    elif output.finished:
                        self._unclaimed.append(output)  # type: ignore[arg-type]
                for _ in range(TURNS_PER_STEP):
                    await asyncio.sleep(0)
        except BaseException as error:  # passed to the waiting requests
            told = error if isinstance(error, Exception) else RuntimeError(f"a step was cut in two by {error!r}")
            for queue in self._waiting.values():
                queue.put_nowait(told)
            if told is not error:
                raise


class SteppedClient(GroupClient, EngineRequests):
    """Groups on an LLMEngine. Overrides: __init__, first_of_answer."""

    fields_in = "extra_args"
    num_ranks = num_api_processes = 1
    client_index = 0
    living_ranks = (0,)
    errored = False
    """A dead engine raises at the call itself."""

    def __init__(self, engine: LLMEngine) -> None:
        super().__init__(engine)
        self.first_of_batch = ""
        """Id of the first request of those that are awaited together."""
        self.vllm_config, self.model_config = engine.vllm_config, engine.model_config
        self.renderer, self.input_processor = engine.renderer, engine.input_processor
        self.engine_core = SteppedCore(engine.engine_core)
        keep_to_output_text(engine.output_processor)
        self.begin_groups(GroupRoutes(Ranks(1)), Metrics(CollectorRegistry()))
        self.door, self.before_rollouts = Door(), None  # no engine is rebuilt here
        self.life = SimpleNamespace(watch=lambda: None)
        self.after_version: list[Any] = []

    @property
    def has_others(self) -> bool:
        """True if the engine has requests that other code has added."""
        return self._engine.get_num_unfinished_requests() > len(self._waiting)

    @property
    def is_read(self) -> bool:
        """True if outputs are awaited."""
        return bool(self._waiting)

    def first_of_answer(self, request_id: str) -> str:
        return self.first_of_batch or request_id

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return self._engine.get_supported_tasks()

"""A real client, output processor and scheduler; the model is made up, and the test makes the steps."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.request import RequestStatus

from tests.kernel.core.scheduler_runs import NO_AUDITS, TracedRun
from tests.support.dry_run import EOS_TOKEN
from vllm_rollout.kernel.api.client import RolloutAsyncLLM
from vllm_rollout.kernel.api.door import Door
from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.kernel.api.group_routes import GroupRoutes, new_ranks
from vllm_rollout.kernel.core.calls import rollout_call
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.wire import CandidateTag


class AddsToRun(AsyncLLM):
    """Adds requests to the dry run of a SteppedLLM."""

    async def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, **kwargs: Any
    ) -> RequestOutputCollector:
        self.num_inside.append(self.door.num_inside)
        id = f"{request_id}-internal"
        while id in self.run.requests:
            id += "-again"
        collector = RequestOutputCollector(params.output_kind, id)
        request = EngineCoreRequest(id, [5] * 20, None, params, None, 0.0, None, None, None, external_req_id=request_id)
        self.output_processor.add_request(request, None, queue=collector)
        tag = CandidateTag.of(params.extra_args)
        self.added[request_id] = tag, kwargs.get("data_parallel_rank")
        self.asked[request_id] = prompt, params
        self.priorities[request_id] = kwargs.get("priority", 0)
        length = prompt["length"] if isinstance(prompt, dict) else prompt[tag.index]
        self.run.add(id, length, extra_args=params.extra_args, logprobs=params.logprobs)
        return collector


class SteppedLLM(RolloutAsyncLLM, AddsToRun):
    """The client of an engine that makes a step when it is told to.

    A prompt is the lengths of its candidates, or as vLLM renders it, with the request's own length in `length`.

    Overrides: __init__, shutdown, max_candidates, num_ranks, errored.
    """

    num_ranks = 1
    max_candidates = 16
    errored = False

    def __init__(self, run: TracedRun, num_ranks: int = 1, *, alone: bool = True, **flags: Any) -> None:
        self.run = run
        self.output_processor = OutputProcessor(None, log_stats=False)
        self.engine_core = self
        self.log_requests = False
        self.num_aborted = 0
        self.door = Door()
        self.before_rollouts = None
        self.when_aborted = lambda names: None
        self.when_all_aborted = lambda: None
        self.num_inside: list[int] = []
        """Number of admitted candidates each time a request was added."""
        self._candidates = WeakKeyDictionary()
        self.num_ranks = num_ranks
        self.vllm_config = SimpleNamespace(
            additional_config=NO_AUDITS.into({}),
            lora_config=None,
            speculative_config=flags.get("speculative_config"),
            scheduler_config=SimpleNamespace(async_scheduling=True),
            parallel_config=SimpleNamespace(
                enable_batch_sharded_sampling=flags.get("enable_batch_sharded_sampling"),
                distributed_executor_backend=None,
            ),
        )
        self.added: dict[str, tuple[CandidateTag, int | None]] = {}
        """Tag and data-parallel rank of every candidate, by external request id."""
        self.asked: dict[str, tuple[Any, SamplingParams]] = {}
        """Prompt and parameters of each, likewise."""
        self.priorities: dict[str, int] = {}
        self.begin_groups(GroupRoutes(new_ranks(num_ranks, alone=alone)), Metrics(CollectorRegistry()))
        self.num_api_processes, self.client_index = 1 if alone else 2, 0
        self.life = SimpleNamespace(watch=lambda: None, living_ranks=[0])
        self.core_engines = [SimpleNamespace(scheduler=run.scheduler, vllm_config=run.scheduler.vllm_config)]

    def shutdown(self, *args: Any, **kwargs: Any) -> None: ...

    async def _call_utility_async(self, method: str, operation: str, payload: bytes, *, engine: Any) -> bytes:
        return rollout_call(engine, operation, payload)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.run.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        self.num_aborted += len(request_ids)

    async def step(self) -> bool:
        """One step, and whatever its outputs set off. False when there was nothing to do."""
        stepped = self.run.step()
        outputs = [output for outputs in self.run.outputs.values() for output in outputs]
        self.run.outputs.clear()
        self.output_processor.process_outputs(outputs)
        await let_everybody_run()
        return stepped

    async def step_to_the_end(self) -> None:
        while await self.step():
            pass

    def own_tokens(self, group_id: str, index: int, length: int, num_tokens: int) -> list[int]:
        """The first tokens of a candidate that would end after `length`."""
        tokens = self.run.own_tokens(f"{group_id}-c{index}-internal", num_tokens)
        return tokens if num_tokens < length else [*tokens[:-1], EOS_TOKEN]


class SteppedEngine(VLLMEngine):
    """The service's engine on such a client, as far as groups need it. Overrides: __init__."""

    def __init__(self, client: RolloutAsyncLLM) -> None:
        self.client, self.parts = client, []


async def let_everybody_run() -> None:
    """Until every task waits for a step of the engine or for a reader."""
    for _ in range(100):
        await asyncio.sleep(0)

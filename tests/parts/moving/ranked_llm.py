"""Real clients, and engines of the service, over several ranks; messages arrive when the test says so.

A message to a rank and one from it waits in the order in which it was sent, as in vLLM's sockets.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.request import RequestStatus

from tests.kernel.api.stepped_llm import let_everybody_run
from tests.kernel.core.scheduler_runs import TracedRun
from tests.parts.moving.moving_runs import Core
from vllm_rollout.kernel.api.client import RolloutAsyncLLM
from vllm_rollout.kernel.api.door import Door
from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.kernel.api.group_routes import GroupRoutes
from vllm_rollout.kernel.core.calls import rollout_call
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.wire import CandidateTag
from vllm_rollout.parts.moving.api.moving import EngineMoves
from vllm_rollout.parts.moving.core.moving import GroupMoves
from vllm_rollout.parts.moving.rules.placement import PredictedRanks


class Rank(Core):
    """An engine core with its sockets. A call that fails says so to whoever called, as vLLM's do."""

    def __init__(self, run: TracedRun) -> None:
        super().__init__(run)
        self.inbox: deque[Callable[[], None]] = deque()
        self.outbox: deque[Callable[[], None]] = deque()
        self.clients: dict[str, RankedLLM] = {}
        """By request, of all ranks."""
        self.fails: Callable[[str], bool] = lambda what: False
        """Asked before whatever may fail in a call."""
        self.calls: list[str] = []
        """Operations, in the order in which they were carried out."""
        self.took_while_held = False
        """A group came to it that another one let go."""

    def turn(self) -> None:
        """It reads what has come, and makes a step."""
        while self.inbox:
            self.inbox.popleft()()
        self.run.step()
        for request_id, outputs in self.run.outputs.items():
            self.outbox.append(lambda id=request_id, said=outputs: self.clients[id].hear(said))
        self.run.outputs.clear()

    def deliver(self) -> None:
        """Deliver the rank's pending messages."""
        while self.outbox:
            self.outbox.popleft()()

    def answer(self, operation: str, payload: bytes, answer: asyncio.Future[bytes]) -> None:
        self.calls.append(operation)
        self.took_while_held |= operation == "adopt_group" and self.scheduler.part(GroupMoves).is_held
        try:
            self._may_fail(operation)
            said = rollout_call(self, operation, payload)
        except Exception as error:
            self.outbox.append(lambda error=error: answer.cancelled() or answer.set_exception(error))
        else:
            self.outbox.append(lambda: answer.cancelled() or answer.set_result(said))

    def _may_fail(self, what: str) -> None:
        if self.fails(what):
            raise RuntimeError(f"{what} failed")

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self._may_fail(method)
        return super().collective_rpc(method, args)

    def preprocess_add_request(self, request: Any) -> tuple[Any, int]:
        self._may_fail("preprocess_add_request")
        return super().preprocess_add_request(request)

    def add_request(self, request: Any, request_wave: int) -> None:
        self._may_fail("add_request")
        super().add_request(request, request_wave)


class SendsToRanks(AsyncLLM):
    """An engine client that sends requests to these ranks."""

    async def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, **kwargs: Any
    ) -> RequestOutputCollector:
        rank, id = kwargs["data_parallel_rank"], f"{request_id}-internal"
        collector = RequestOutputCollector(params.output_kind, id)
        request = EngineCoreRequest(id, [5] * 20, None, params, None, 0.0, None, None, None, external_req_id=request_id)
        self.output_processor.add_request(request, None, queue=collector)
        core = self.reqs_in_flight[id] = self.core_engines[rank]
        self.engine_inflight[core] += 1
        core.clients[id] = self
        tag = CandidateTag.of(params.extra_args)
        length = prompt if tag is None else prompt[tag.index]
        core.inbox.append(lambda: core.run.add(id, length, extra_args=params.extra_args))
        return collector


class RankedLLM(RolloutAsyncLLM, SendsToRanks):
    """The client of an API process. A prompt is the lengths of its candidates.

    Overrides: __init__, shutdown, max_candidates, num_ranks, errored.
    """

    max_candidates = 256
    num_ranks = 0
    errored = False

    def __init__(self, cores: Sequence[Rank], index: int, num_api_processes: int) -> None:
        self.core_engines = cores
        self.num_ranks = len(cores)
        self.engine_core = self
        self.reqs_in_flight: dict[str, Rank] = {}
        self.engine_inflight: Counter[Rank] = Counter()
        self.output_processor = OutputProcessor(None, log_stats=False)
        self.log_requests = False
        self.door = Door()
        self.before_rollouts = None
        self.when_aborted = lambda names: None
        self.when_all_aborted = lambda: None
        self._candidates = WeakKeyDictionary()
        self.vllm_config = cores[0].scheduler.vllm_config
        self.model_config = SimpleNamespace(get_diff_sampling_param=dict)
        self.num_api_processes, self.client_index = num_api_processes, index
        ranks = PredictedRanks(len(cores), index, alone=num_api_processes == 1)
        self.begin_groups(GroupRoutes(ranks), Metrics(CollectorRegistry()))
        self.life = SimpleNamespace(watch=lambda: None)
        self.dead: set[int] = set()

    def shutdown(self, *args: Any, **kwargs: Any) -> None: ...

    @property
    def living_ranks(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank not in self.dead]

    def forget(self, request_id: str) -> None:
        if (core := self.reqs_in_flight.pop(request_id, None)) is not None:
            self.engine_inflight[core] -= 1

    def hear(self, outputs: list[Any]) -> None:
        for output in outputs:
            if output.finished:
                self.forget(output.request_id)
        self.output_processor.process_outputs(outputs)

    async def _call_utility_async(self, method: str, operation: str, payload: bytes, *, engine: Rank) -> bytes:
        answer = asyncio.get_running_loop().create_future()
        engine.inbox.append(lambda: engine.answer(operation, payload, answer))
        return await answer

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for id in request_ids:
            if (core := self.reqs_in_flight.get(id)) is not None:
                core.inbox.append(
                    lambda core=core, id=id: core.scheduler.finish_requests([id], RequestStatus.FINISHED_ABORTED)
                )

    def die(self, rank: int) -> None:
        """Everybody hears that a rank has died."""
        self.dead.add(rank)
        self.routes.bury(rank)


class RankedEngine(VLLMEngine):
    @property
    def moves(self) -> EngineMoves:
        return self.part(EngineMoves)


class Cluster:
    """Ranks, the API processes before them, and what came of the groups that were started."""

    def __init__(self, ranks: Any, num_api_processes: int = 1) -> None:
        self.ranks = ranks
        self.cores: list[Rank] = ranks.cores
        clients: dict[str, RankedLLM] = {}
        for core in self.cores:
            core.clients = clients
        self.llms = [RankedLLM(self.cores, index, num_api_processes) for index in range(num_api_processes)]
        names = SimpleNamespace(openai_serving_models=None, online_renderer=None)
        self.engines = [RankedEngine(llm, names) for llm in self.llms]
        self.engine, self.llm = self.engines[0], self.llms[0]
        self.ends: dict[tuple[str, int], list[str]] = {}
        """End states of each candidate, in order."""
        self.said: dict[tuple[str, int], list[int]] = {}
        self.readers: dict[str, asyncio.Task[None]] = {}

    def start(
        self,
        group_id: str,
        lengths: list[int],
        group_size: int,
        process: int = 0,
        **kwargs: Any,
    ) -> None:
        """A group begins, and somebody reads it."""
        self.readers[group_id] = asyncio.create_task(self._read(group_id, lengths, group_size, process, kwargs))

    async def _read(self, group_id: str, lengths: list[int], group_size: int, process: int, kwargs: Any) -> None:
        plan = GroupPlan(group_size, len(lengths) - group_size)
        params = SamplingParams(max_tokens=4000, detokenize=False, output_kind=RequestOutputKind.CUMULATIVE)
        stream = self.llms[process].run_candidates(group_id, plan, lengths, params, **kwargs)
        async with aclosing(stream) as outputs:
            async for output in outputs:
                candidate = group_id, output.index
                if output.output is None:
                    self.ends.setdefault(candidate, []).append("failed")
                    continue
                self.said[candidate] = list(output.output.outputs[0].token_ids)
                if output.output.finished:
                    self.ends.setdefault(candidate, []).append(output.note.state)

    async def turn(self, happens: Callable[[], bool] = lambda: True) -> None:
        """Every rank reads, steps and is heard, unless `happens` says that it is slow."""
        await let_everybody_run()
        for core in self.cores:
            if happens():
                core.turn()
            if happens():
                core.deliver()
        await let_everybody_run()

    async def until(self, is_done: Callable[[], Any]) -> None:
        for _ in range(3000):
            if is_done():
                return
            await self.turn()
        raise AssertionError("it does not come")

    async def done(self, *work: asyncio.Future[Any]) -> list[Any]:
        """Results of these works, exceptions included."""
        everything = asyncio.gather(*work, return_exceptions=True)
        await self.until(everything.done)
        return everything.result()

    @asynccontextmanager
    async def at(self, operation: str, rank: int) -> AsyncIterator[None]:
        """Until this operation has reached a rank; its answer is still on the way when the body runs."""
        before = self.cores[rank].calls.count(operation)
        for _ in range(3000):
            await let_everybody_run()
            for core in self.cores:
                core.turn()
                if core is self.cores[rank] and core.calls.count(operation) > before:
                    yield
                    return
                core.deliver()
        raise AssertionError(f"rank {rank} is not asked to {operation}")

    def cores_of(self, group_id: str) -> list[int]:
        """Ranks on which candidates of a group run or wait."""
        return [rank for rank, core in enumerate(self.cores) if core.scheduler.candidates_of(group_id)]

    @property
    def held(self) -> list[int]:
        return [rank for rank, core in enumerate(self.cores) if core.scheduler.part(GroupMoves).is_held]

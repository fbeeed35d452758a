"""vLLM's engine client with groups: one tagged vLLM request per candidate, siblings on one data-parallel rank.

Invariant: a request without our fields takes the base class's path untouched.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, nullcontext
from copy import copy
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from vllm.config import VllmConfig
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from vllm_rollout.adapter.api.door import Door
from vllm_rollout.adapter.api.emulate import fork_emulated_engines
from vllm_rollout.adapter.api.group_routes import GroupRoutes
from vllm_rollout.adapter.api.life import Life
from vllm_rollout.adapter.api.open_paths import refuse_on_open_path
from vllm_rollout.adapter.api.outputs import (
    CandidateFailed,
    CandidateOutput,
    choices_of,
    ending_of,
    mend_weight_versions,
)
from vllm_rollout.adapter.api.prompts import digest_of_prompt
from vllm_rollout.adapter.api.rank_client import RankDied
from vllm_rollout.adapter.api.refusals import pruning_refusal
from vllm_rollout.adapter.api.resuming import resumed_params, resumed_prompt
from vllm_rollout.adapter.api.versions import REJECTIONS
from vllm_rollout.adapter.options import RolloutOptions
from vllm_rollout.adapter.wire import TAG_KEY, CandidateTag, EndingNote
from vllm_rollout.config import OUTPUT_INTERVAL_TOKENS
from vllm_rollout.emulation.fate import LENGTHS_FIELD, forced_length
from vllm_rollout.group.judge import Scoring
from vllm_rollout.group.placement import Placement
from vllm_rollout.group.plan import GroupJoin, GroupPlan, PlanError
from vllm_rollout.group.prompt_key import joined_id, seed_for
from vllm_rollout.group.pruning_plan import PruningPlan
from vllm_rollout.group.race import RacePlace
from vllm_rollout.group.selection import conclude
from vllm_rollout.group.types import STOP_STATES, Ending
from vllm_rollout.server.engine import Beginnings, Outlook
from vllm_rollout.server.metrics import Metrics
from vllm_rollout.server.xargs import PRUNING_XARGS, as_written, plan_from_xargs, rollout_xargs

logger = init_logger("vllm.vllm_rollout")


class RolloutAsyncLLM(AsyncLLM):
    """AsyncLLM that runs groups.

    Overrides: __init__, generate, add_request, abort, shutdown, collective_rpc, pause_generation, sleep.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.before_shutdown: Callable[[], None] | None = None
        """Called once, on the thread that stops the engine, while the engine still answers."""
        self.before_weights: Callable[[], Awaitable[None]] | None = None
        """Called before a trainer pauses the engine, lets it sleep or sends it weights."""
        self.door = Door()
        fork_emulated_engines(kwargs["vllm_config"])
        super().__init__(*args, **kwargs)
        self.rollout_metrics = Metrics()
        self._candidates: WeakKeyDictionary[RequestOutputCollector, str] = WeakKeyDictionary()
        """Group ids of candidates on their way. Request ids do not tell candidates, since clients may give theirs to
        other requests too."""
        self.client_index = int(kwargs.get("client_index", 0))
        """Which of the API processes this is."""
        self.num_api_processes = int(kwargs.get("client_count", 1))
        # Ties go in turn, and several API processes begin with different ranks.
        self._placement = Placement(self.num_ranks, self.client_index, alone=self.num_api_processes == 1)
        self.routes = GroupRoutes(self._placement, self.request_counts if self.num_ranks > 1 else None)
        self.life = Life(self)

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        before, self.before_shutdown = self.before_shutdown, None
        if before is not None:
            before()
        super().shutdown(*args, **kwargs)

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks this client can choose from."""
        parallel = self.vllm_config.parallel_config
        return parallel.data_parallel_size_local if parallel.local_engines_only else parallel.data_parallel_size

    def request_counts(self) -> list[int]:
        """Requests on each rank, running or waiting, whoever sent them.

        As vLLM's coordinator has last told, plus those that vLLM's own balancing has sent since, times the number of
        API processes; at least those that this process has sent, which are known at once.
        """
        core = self.engine_core
        told = zip(core.core_engines, core.lb_engines, strict=True)
        return [max(waiting + running, core.engine_inflight[engine]) for engine, (waiting, running, _) in told]

    @property
    def living_ranks(self) -> list[int]:
        """Of these, those that have not died."""
        return self.life.living_ranks

    @property
    def max_candidates(self) -> int:
        return self.vllm_config.scheduler_config.max_num_seqs

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        if self.routes.held:
            self._refuse_held(kwargs.get("data_parallel_rank"))
        extra_args = sampling_params.extra_args
        if not extra_args:
            return self._generate_plain(prompt, sampling_params, request_id, **kwargs)
        if TAG_KEY in extra_args:
            raise VLLMValidationError(f"extra_args.{TAG_KEY} is set by the server; send rollout_* fields instead.")
        self._check_forced_length(extra_args)
        xargs = rollout_xargs(extra_args)
        if not xargs:
            return self._generate_plain(prompt, sampling_params, request_id, **kwargs)
        refuse_on_open_path(xargs)
        try:
            plan = plan_from_xargs(xargs, sampling_params.n, max_candidates=self.max_candidates)
        except PlanError as error:
            raise VLLMValidationError(f"vllm_xargs.{error}", parameter=f"vllm_xargs.{error.field}") from error
        if plan.pruning is not None and (refusal := pruning_refusal(self.vllm_config)) is not None:
            field = f"vllm_xargs.{PRUNING_XARGS['detection_length']}"
            raise VLLMValidationError(f"{field}: {refusal}", parameter=field)
        params = copy(sampling_params)
        params.extra_args = {key: value for key, value in extra_args.items() if key not in xargs}
        if isinstance(plan, GroupJoin):
            return self._generate_joined(plan, prompt, params, request_id, **kwargs)
        return self._generate_choices(plan, prompt, params, request_id, **kwargs)

    def _generate_plain(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """A request outside of groups: vLLM balances them, but does not know of ranks that are held."""
        if self.routes.held and kwargs.get("data_parallel_rank") is None:
            kwargs["data_parallel_rank"] = self.routes.next_rank()
        return super().generate(prompt, sampling_params, request_id, **kwargs)

    def _refuse_held(self, pinned_rank: int | None) -> None:
        """Raises: VLLMValidationError for a request that is pinned to a rank that is held; RankDied."""
        if pinned_rank in self.life.dead:
            raise RankDied.of(pinned_rank)
        if pinned_rank in self.routes.held:
            raise VLLMValidationError(
                f"data_parallel_rank: rank {pinned_rank} is drained. Leave it out, name another rank, or restore it by "
                f"POST /v1/engines/{pinned_rank}/restore.",
                parameter="data_parallel_rank",
            )

    def _check_forced_length(self, extra_args: dict[str, Any]) -> None:
        """Here, since a worker has nobody to tell. Raises: VLLMValidationError."""
        if RolloutOptions.of(self.vllm_config).emulation is not None:
            try:
                forced_length(extra_args)
            except ValueError as error:
                raise VLLMValidationError(f"extra_args.{error}", parameter=f"extra_args.{LENGTHS_FIELD}") from error

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Abort requests. A candidate ends with the scheduler's last output, so that tokens held there are not lost."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        known = self.output_processor.external_req_ids
        named = ids if internal else [internal_id for id in ids for internal_id in known.get(id, ())]
        candidates = [id for id in named if self._is_candidate(id)]
        if not candidates:
            await super().abort(ids, internal)
            return
        for id in candidates:  # an abort that overtook its candidate would stop nothing
            await self._at_rest(id)
        await self.engine_core.abort_requests_async(candidates)
        if others := [id for id in named if id not in candidates]:
            await super().abort(others, internal=True)

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> RequestOutputCollector:
        tag = CandidateTag.of(params.extra_args) if isinstance(params, SamplingParams) else None
        route = None if tag is None else self.routes.find(tag.group_id)  # a profiler's candidates have none
        async with self.door.passing(), nullcontext() if route is None else route.launching() as rank:
            self.life.watch()
            if rank is not None and self.num_ranks > 1:
                kwargs["data_parallel_rank"] = rank
            try:
                collector = await super().add_request(request_id, prompt, params, *args, **kwargs)
            except RankDied as death:  # vLLM has noted the request already
                self.lose([death.request_id], death)
                raise
        if tag is not None:
            self._candidates[collector] = tag.group_id
        return collector

    async def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        await self._weights_come()
        return await super().collective_rpc(*args, **kwargs)

    async def pause_generation(self, *args: Any, **kwargs: Any) -> None:
        await self._weights_come()
        await super().pause_generation(*args, **kwargs)

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        await self._weights_come()
        await super().sleep(*args, **kwargs)

    async def _weights_come(self) -> None:
        if self.before_weights is not None:
            await self.before_weights()

    async def stop_reading(self) -> asyncio.Task[None] | None:
        """Read no more outputs of the engine; returns what has read them, ended."""
        handler, self.output_handler = self.output_handler, None
        if handler is not None:
            handler.cancel()
            await asyncio.gather(handler, return_exceptions=True)
        return handler

    def read_from(self, engine_core: AsyncMPClient, config: VllmConfig) -> None:
        """Use another engine from now on."""
        self.engine_core, self.vllm_config = engine_core, config
        self._run_output_handler()

    def _is_candidate(self, internal_id: str) -> bool:
        return self._group_of(internal_id) is not None

    def _group_of(self, internal_id: str) -> str | None:
        """Of a candidate on its way."""
        state = self.output_processor.request_states.get(internal_id)
        return None if state is None else self._candidates.get(state.queue)

    async def _at_rest(self, internal_id: str) -> None:
        """Wait while this candidate moves between ranks."""
        route = self.routes.find(self._group_of(internal_id) or "")
        if route is not None:
            await route.at_rest()

    def send_to(self, rank: int, request_ids: Iterable[str]) -> None:
        """From now on what concerns these requests goes to that rank."""
        core = self.engine_core
        target = core.core_engines[rank]
        for request_id in request_ids:
            before = core.reqs_in_flight.get(request_id)
            if before is None:  # it ended on this side, a moment ago
                continue
            core.reqs_in_flight[request_id] = target
            core.engine_inflight[before] -= 1
            core.engine_inflight[target] += 1

    def lose(self, request_ids: Iterable[str], error: Exception) -> None:
        """These requests are in no engine core any more: who waits for their outputs is told."""
        for request_id in request_ids:
            self.engine_core.forget(request_id)
            state = self.output_processor.request_states.get(request_id)
            if state is not None:
                self.output_processor.abort_requests([request_id], internal=True)
                state.queue.put(error)

    async def _generate_candidate(
        self, tag: CandidateTag, prompt: Any, params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[tuple[RequestOutput, EndingNote | None], None]:
        """One candidate's outputs, each with the scheduler's note when it is the last.

        Raises: VLLMValidationError when the group that it names did not let it in.
        """
        params.extra_args = {**(params.extra_args or {}), **tag.to_extra_args()}
        async with aclosing(super().generate(prompt, params, request_id, **kwargs)) as outputs:
            async for output in outputs:
                note, output.kv_transfer_params = EndingNote.take(output.kv_transfer_params)
                if note is not None and note.refusal is not None:
                    field, refusal = as_written(note.refusal)
                    raise VLLMValidationError(f"vllm_xargs.{refusal}", parameter=f"vllm_xargs.{field}")
                if note is not None:
                    (completion,) = output.outputs
                    mend_weight_versions(completion, note.pauses)
                    if note.state in STOP_STATES:  # a stop string in the last token does not make it a winner
                        completion.finish_reason, completion.stop_reason = "abort", note.state
                yield output, note

    async def run_candidates(
        self,
        group_id: str,
        plan: GroupPlan,
        prompt: Any,
        params: SamplingParams,
        *,
        scoring: Scoring | None = None,
        observed: bool = True,
        place: RacePlace | None = None,
        beginnings: Beginnings | None = None,
        outlook: Outlook | None = None,
        data_parallel_rank: int | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[CandidateOutput | CandidateFailed, None]:
        """Run the candidates of one group; yields their outputs as they come, in the kind `params` asks for.

        With `beginnings` they go on from there; their outputs have what comes after. `outlook`: what is expected of
        them, by which a rank is chosen, and what they may move to another one for.

        Without `observed` and `scoring` nobody looks at their logits, and there is no mean confidence.

        A candidate that fails ends with a final output of finish reason `error` or `abort`, or as CandidateFailed.
        Closing the generator aborts what still runs. Raises what concerns all candidates alike: bad parameters, a full
        queue, a dead engine.

        However much the engine generates, at most three outputs per candidate are held for a reader that does not read:
        as many as there are candidates in the queue, and of each candidate one that waits for room there and one into
        which vLLM merges the deltas that nobody has taken.
        """
        before_each = dict.fromkeys(range(plan.num_candidates), ()) if beginnings is None else beginnings.token_ids
        begun = {index: len(before) for index, before in before_each.items()}
        route = self.routes.open(group_id, begun, data_parallel_rank, outlook)
        # One place per candidate: with fewer, candidates of one step wait for each other, a task switch per output.
        queue: asyncio.Queue[CandidateOutput | CandidateFailed | int | Exception] = asyncio.Queue(plan.num_candidates)
        params = params.clone()
        params.skip_clone = True  # siblings share what they only read; each gets its own copy of the rest below
        delta = params.output_kind == RequestOutputKind.DELTA
        interval = (params.stream_interval or 1) if delta else OUTPUT_INTERVAL_TOKENS

        spare_indices = count(plan.num_candidates if beginnings is None else beginnings.next_index)

        async def run(index: int, before: Sequence[int] = ()) -> None:
            tag = CandidateTag(
                group_id,
                index,
                plan.group_size,
                plan.num_candidates,
                plan.early_stop,
                interval,
                scoring,
                plan.patience,
                observed,
                plan.num_replaceable,
                place,
                len(before),
            )
            child = resumed_params(params, len(before))
            child.n = 1
            child.seed = None if params.seed is None else params.seed + index  # as vLLM seeds the n of a request
            whole_prompt = resumed_prompt(prompt, before)
            outputs = self._generate_candidate(
                tag, whole_prompt, child, f"{group_id}-c{index}", data_parallel_rank=data_parallel_rank, **kwargs
            )
            try:
                num_tokens = 0
                async with aclosing(outputs):
                    async for output, note in outputs:
                        num_tokens += len(output.outputs[0].token_ids)
                        await queue.put(CandidateOutput(index, output, note))
                        if note is not None and note.is_replaced:  # before it counts as over
                            tasks.append(asyncio.create_task(run(spare := next(spare_indices))))
                            self.routes.begins(route, spare)
                self.routes.ended(route, index, num_tokens)
                await queue.put(index)
            except (VLLMClientError, GracefulHTTPError, EngineDeadError, *REJECTIONS) as error:
                await queue.put(error)
            except Exception:  # one candidate's failure is not its group's: the reader ends it as failed
                logger.exception("candidate %d of group %s failed", index, group_id)
                await queue.put(CandidateFailed(index))
                await queue.put(index)

        tasks = [asyncio.create_task(run(index, before)) for index, before in before_each.items()]
        try:
            num_over = 0
            while num_over < len(tasks):
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, int):
                    num_over += 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.routes.close(route)

    async def _generate_choices(
        self, plan: GroupPlan, prompt: Any, params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """A group behind an OpenAI request: exactly n choices. It teaches nothing, since no reward can name them.

        The winners are known when the group is over, so a stream gets each of them in one piece.
        """
        started = time.monotonic()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        finals: dict[int, RequestOutput] = {}
        endings: dict[int, Ending] = {}
        group_id = f"{request_id}-{uuid.uuid4().hex[:8]}"
        scoring = plan.pruning and _scoring(plan.pruning, group_id, digest_of_prompt(prompt), params)
        stream = self.run_candidates(group_id, plan, prompt, params, scoring=scoring, observed=False, **kwargs)
        async with aclosing(stream) as outputs:
            async for candidate in outputs:
                if isinstance(candidate, CandidateFailed):
                    continue
                finals[candidate.index] = candidate.output
                endings[candidate.index] = ending_of(candidate)
                if candidate.note is not None and candidate.note.assessment is not None:
                    self.rollout_metrics.candidate_scored(candidate.note.assessment)
        for index in range(plan.num_candidates):
            endings.setdefault(index, Ending(index, "failed", 0))
        result = conclude(plan, endings.values())
        self.rollout_metrics.group_over(result, time.monotonic() - started)
        if not finals:
            raise RuntimeError(f"all {plan.num_candidates} candidates of request {request_id} failed")
        answer = next(iter(finals.values()))
        answer.request_id = request_id
        answer.outputs = choices_of(plan, result, finals)
        answer.finished = True
        yield answer

    async def _generate_joined(
        self, join: GroupJoin, prompt: Any, params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """One of several requests that make up a group: they meet on one rank. It teaches nothing."""
        content = digest_of_prompt(prompt)
        lora: LoRARequest | None = kwargs.get("lora_request")
        group_id = joined_id(join.namespace, join.name, content, "" if lora is None else lora.lora_name)
        tag = CandidateTag(
            group_id,
            None,
            join.group_size,
            join.num_candidates,
            join.early_stop,
            1 if params.output_kind != RequestOutputKind.FINAL_ONLY else OUTPUT_INTERVAL_TOKENS,
            join.pruning and _scoring(join.pruning, group_id, content, params),
            observed=False,
        )
        route = self.routes.join(group_id, join.num_candidates, kwargs.get("data_parallel_rank"))
        num_tokens, refused = 0, False
        last: CandidateOutput | None = None
        try:
            async with aclosing(self._generate_candidate(tag, prompt, params, request_id, **kwargs)) as outputs:
                async for output, note in outputs:
                    (completion,) = output.outputs
                    before = num_tokens if params.output_kind == RequestOutputKind.DELTA else 0
                    num_tokens = before + len(completion.token_ids)
                    last = CandidateOutput(0, output, note)
                    if note is not None and note.assessment is not None:
                        self.rollout_metrics.candidate_scored(note.assessment)
                    yield output
        except (VLLMClientError, GracefulHTTPError, *REJECTIONS):
            refused = True
            raise
        finally:
            self.routes.leave_joined(route, refused=refused)
            if not refused:
                self.rollout_metrics.joined_over(
                    Ending(0, "failed", num_tokens) if last is None else ending_of(last, num_tokens)
                )


def _scoring(plan: PruningPlan, group_id: str, content: str, params: SamplingParams) -> Scoring:
    """Of a group that teaches nothing. Chance: the same seeded request gets the same verdicts, others do not."""
    seed = secrets.randbits(62) if params.seed is None else seed_for(params.seed, content)
    return Scoring(group_id, content, seed, plan, teaches=False)

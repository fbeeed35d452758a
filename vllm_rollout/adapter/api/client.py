"""vLLM's engine client with groups: one tagged vLLM request per candidate, siblings on one data-parallel rank.

Invariant: a request without our fields takes the base class's path untouched.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.logger import init_logger
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_rollout.adapter.wire import TAG_KEY, CandidateTag, EndingNote
from vllm_rollout.config import OUTPUT_INTERVAL_TOKENS
from vllm_rollout.group.judge import Scoring
from vllm_rollout.group.plan import GroupJoin, GroupPlan, PlanError
from vllm_rollout.group.selection import conclude
from vllm_rollout.group.types import STOP_STATES, Ending, GroupResult
from vllm_rollout.server.metrics import Metrics
from vllm_rollout.server.xargs import plan_from_xargs, rollout_xargs

logger = init_logger("vllm.vllm_rollout")

TRUNCATED = frozenset({"length", "repetition"})


@dataclass(frozen=True, slots=True)
class CandidateOutput:
    """One output of a candidate; `note` comes with the last one of a candidate the scheduler ended."""

    index: int
    output: RequestOutput
    note: EndingNote | None


class RolloutAsyncLLM(AsyncLLM):
    """AsyncLLM that runs groups. Overrides: __init__, generate, abort, shutdown."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.before_shutdown: Callable[[], None] | None = None
        """Called once, on the thread that stops the engine, while the engine still answers."""
        super().__init__(*args, **kwargs)
        self.rollout_metrics = Metrics()
        self._candidates_on_rank: Counter[int] = Counter()
        self._candidate_ids: set[str] = set()
        """External request ids of candidates on their way."""
        self.client_index = int(kwargs.get("client_index", 0))
        """Which of the API processes this is."""
        self.num_api_processes = int(kwargs.get("client_count", 1))
        self._next_rank = self.client_index
        """Where a tie goes: several API processes, and groups one after the other, take turns."""

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

    @property
    def max_candidates(self) -> int:
        return self.vllm_config.scheduler_config.max_num_seqs

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        extra_args = sampling_params.extra_args
        if not extra_args:
            return super().generate(prompt, sampling_params, request_id, **kwargs)
        if TAG_KEY in extra_args:
            raise VLLMValidationError(f"extra_args.{TAG_KEY} is set by the server; send rollout_* fields instead.")
        xargs = rollout_xargs(extra_args)
        if not xargs:
            return super().generate(prompt, sampling_params, request_id, **kwargs)
        try:
            plan = plan_from_xargs(xargs, sampling_params.n, max_candidates=self.max_candidates)
        except PlanError as error:
            raise VLLMValidationError(f"vllm_xargs.{error}", parameter=f"vllm_xargs.{error.field}") from error
        params = copy(sampling_params)
        params.extra_args = {key: value for key, value in extra_args.items() if key not in xargs}
        if isinstance(plan, GroupJoin):
            return self._generate_joined(plan, prompt, params, request_id, **kwargs)
        return self._generate_choices(plan, prompt, params, request_id, **kwargs)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Abort requests. A candidate ends with the scheduler's last output, so that tokens held there are not lost."""
        processor = self.output_processor
        others: list[str] = []
        candidates: list[str] = []
        for id in [request_id] if isinstance(request_id, str) else request_id:
            state = processor.request_states.get(id) if internal else None
            external_id = id if not internal else None if state is None else state.external_req_id
            if external_id in self._candidate_ids:
                candidates += [id] if internal else processor.external_req_ids.get(id, ())
            else:
                others.append(id)
        if candidates:
            await self.engine_core.abort_requests_async(candidates)
        if others:
            await super().abort(others, internal)

    async def _generate_candidate(
        self, tag: CandidateTag, prompt: Any, params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[tuple[RequestOutput, EndingNote | None], None]:
        """One candidate's outputs, each with the scheduler's note when it is the last."""
        params.extra_args = {**(params.extra_args or {}), **tag.to_extra_args()}
        self._candidate_ids.add(request_id)
        try:
            async with aclosing(super().generate(prompt, params, request_id, **kwargs)) as outputs:
                async for output in outputs:
                    note, output.kv_transfer_params = EndingNote.take(output.kv_transfer_params)
                    if note is not None:
                        (completion,) = output.outputs
                        mend_weight_versions(completion, note.pauses)
                        if note.state in STOP_STATES:  # a stop string in the last token does not make it a winner
                            completion.finish_reason, completion.stop_reason = "abort", note.state
                    yield output, note
        finally:
            self._candidate_ids.discard(request_id)

    async def run_candidates(
        self,
        group_id: str,
        plan: GroupPlan,
        prompt: Any,
        params: SamplingParams,
        *,
        scoring: Scoring | None = None,
        data_parallel_rank: int | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[CandidateOutput, None]:
        """Run the candidates of one group; yields their outputs as they come, in the kind `params` asks for.

        A candidate that fails ends with a final output of finish reason `error` or `abort`. Closing the generator
        aborts what still runs. Raises what concerns all candidates alike: bad parameters, a full queue, a dead engine.

        However much the engine generates, at most three outputs per candidate are held for a reader that does not read:
        as many as there are candidates in the queue, and of each candidate one that waits for room there and one into
        which vLLM merges the deltas that nobody has taken.
        """
        rank = self._choose_rank() if data_parallel_rank is None else data_parallel_rank
        if rank is not None:
            self._candidates_on_rank[rank] += plan.num_candidates
        # One place per candidate: with fewer, candidates of one step wait for each other, a task switch per output.
        queue: asyncio.Queue[CandidateOutput | int | Exception] = asyncio.Queue(plan.num_candidates)
        params = params.clone()
        params.skip_clone = True  # siblings share what they only read; each gets its own copy of the rest below
        delta = params.output_kind == RequestOutputKind.DELTA
        interval = (params.stream_interval or 1) if delta else OUTPUT_INTERVAL_TOKENS

        async def run(index: int) -> None:
            tag = CandidateTag(
                group_id,
                index,
                plan.group_size,
                plan.num_candidates,
                plan.early_stop,
                interval,
                scoring,
                plan.patience,
            )
            child = copy(params)
            child.n = 1
            child.seed = None if params.seed is None else params.seed + index  # as vLLM seeds the n of a request
            outputs = self._generate_candidate(
                tag, prompt, child, f"{group_id}-c{index}", data_parallel_rank=rank, **kwargs
            )
            try:
                async with aclosing(outputs):
                    async for output, note in outputs:
                        await queue.put(CandidateOutput(index, output, note))
                await queue.put(index)
            except (VLLMClientError, GracefulHTTPError, EngineDeadError) as error:
                await queue.put(error)
            except Exception:  # one candidate's failure is not its group's: the reader ends it as failed
                logger.exception("candidate %d of group %s failed", index, group_id)
                await queue.put(index)

        tasks = [asyncio.create_task(run(index)) for index in range(plan.num_candidates)]
        try:
            num_running = len(tasks)
            while num_running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, int):
                    num_running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if rank is not None:
                self._candidates_on_rank[rank] -= plan.num_candidates

    def _choose_rank(self) -> int | None:
        """The rank with the fewest candidates of ours; None when there is only one."""
        if self.num_ranks == 1:
            return None
        turns = [(self._next_rank + turn) % self.num_ranks for turn in range(self.num_ranks)]
        rank = min(turns, key=lambda rank: self._candidates_on_rank[rank])
        self._next_rank = (rank + 1) % self.num_ranks
        return rank

    async def _generate_choices(
        self, plan: GroupPlan, prompt: Any, params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """A group behind an OpenAI request: exactly n choices.

        The winners are known when the group is over, so a stream gets each of them in one piece.
        """
        started = time.monotonic()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        finals: dict[int, RequestOutput] = {}
        endings: dict[int, Ending] = {}
        group_id = f"{request_id}-{uuid.uuid4().hex[:8]}"
        scoring = plan.pruning and Scoring(request_id, request_id, _chance_seed(params), plan.pruning)
        stream = self.run_candidates(group_id, plan, prompt, params, scoring=scoring, **kwargs)
        async with aclosing(stream) as outputs:
            async for candidate in outputs:
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
        answer.outputs = _choices(plan, result, finals)
        answer.finished = True
        yield answer

    async def _generate_joined(
        self, join: GroupJoin, prompt: Any, params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """One of several requests that make up a group: all of them go to the rank their group id names."""
        tag = CandidateTag(
            join.name,
            None,
            join.group_size,
            join.num_candidates,
            join.early_stop,
            1 if params.output_kind != RequestOutputKind.FINAL_ONLY else OUTPUT_INTERVAL_TOKENS,
            join.pruning and Scoring(join.name, join.name, _chance_seed(params), join.pruning),
        )
        if kwargs.get("data_parallel_rank") is None and self.num_ranks > 1:
            kwargs["data_parallel_rank"] = zlib.crc32(join.name.encode()) % self.num_ranks
        async with aclosing(self._generate_candidate(tag, prompt, params, request_id, **kwargs)) as outputs:
            async for output, _ in outputs:
                yield output


def _chance_seed(params: SamplingParams) -> int:
    """The same seeded request gets the same verdicts; others do not."""
    return secrets.randbits(62) if params.seed is None else params.seed


def ending_of(candidate: CandidateOutput, num_tokens: int | None = None) -> Ending:
    """The ending in a candidate's last output; `num_tokens` when that output is a delta."""
    (completion,) = candidate.output.outputs
    note = candidate.note
    failed = note is None or completion.finish_reason == "error"
    return Ending(
        index=candidate.index,
        state="failed" if failed else note.state,
        num_tokens=len(completion.token_ids) if num_tokens is None else num_tokens,
        truncated=completion.finish_reason in TRUNCATED,
        end_step=0 if note is None else note.end_step,
        ended_by_itself=not failed and note.ended_by_itself,
    )


def mend_weight_versions(completion: CompletionOutput, pauses: Sequence[int]) -> None:
    """Move version boundaries from where held tokens arrived to where they were made.

    Weights change only while generation is paused, and the first output after a pause is sent at once; so a version
    that seems to start at token s, because the tokens since s were held, started at the first pause at or after s.
    """
    spans = completion.weight_versions
    if not spans or len(spans) < 2 or not pauses:
        return
    starts = [0] + [next((p for p in pauses if p >= span.start), span.start) for span in spans[1:]]
    ends = [*starts[1:], spans[-1].end]
    completion.weight_versions = [
        WeightVersionSpan(span.version, start, end) for span, start, end in zip(spans, starts, ends, strict=True)
    ]


def _choices(plan: GroupPlan, result: GroupResult, finals: dict[int, RequestOutput]) -> list[CompletionOutput]:
    """Exactly `group_size` choices: the selected ones, and in an incomplete group what the others left, most first."""
    indices = list(result.selected)
    others = [e for e in result.endings if e.index not in result.selected and e.index in finals]
    others.sort(key=lambda e: (-e.num_tokens, e.index))
    indices += [e.index for e in others][: plan.group_size - len(indices)]
    choices = []
    for position, index in enumerate(indices):
        (choice,) = finals[index].outputs
        choice.index = position
        choices.append(choice)
    for position in range(len(choices), plan.group_size):
        choices.append(
            CompletionOutput(
                index=position, text="", token_ids=[], cumulative_logprob=None, logprobs=None, finish_reason="abort"
            )
        )
    return choices

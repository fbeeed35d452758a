"""Candidates of groups: one tagged vLLM request each, and their output as the service reads it.

Invariant: each candidate ends once, and its end has all tokens that were reported before.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import asdict, dataclass
from http import HTTPStatus
from itertools import count
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.logger import init_logger
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_rollout.adapter.names import AdapterNames
from vllm_rollout.config import OUTPUT_INTERVAL_TOKENS
from vllm_rollout.kernel.api.continued import resumed_params, resumed_prompt
from vllm_rollout.kernel.api.engine_calls import RankDied, engine_stopped
from vllm_rollout.kernel.api.group_routes import GroupRoutes, NoRankLeft
from vllm_rollout.kernel.api.versions import REJECTIONS, mend_weight_spans, version_spans, weight_spans
from vllm_rollout.kernel.http.clients import client_namespace
from vllm_rollout.kernel.http.engine import (
    Beginnings,
    CandidateEnd,
    CandidateTokens,
    GroupLost,
    GroupOrder,
    Happening,
    NoRankTakes,
    Outlook,
    RequestError,
)
from vllm_rollout.kernel.http.fan_in import FanIn
from vllm_rollout.kernel.http.ports import ApiPart
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.prompt_key import seed_for
from vllm_rollout.kernel.rules.terms_port import resumed_of
from vllm_rollout.kernel.rules.types import STOP_STATES, Ending
from vllm_rollout.kernel.wire import CandidateTag, EndingNote
from vllm_rollout.kernel.xargs import as_written

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""
TRUNCATED = frozenset({"length", "repetition"})
NO_NOTE = EndingNote("failed", 0, None)
"""Stands for the note of a candidate that the scheduler did not end."""

logger = init_logger("vllm.vllm_rollout")


@dataclass(frozen=True, slots=True)
class CandidateOutput:
    """One output of a candidate. `note` comes with the last output of a candidate that the scheduler ended."""

    index: int
    output: RequestOutput | None
    """None for the end of a candidate that raised an exception in our code or vLLM's. Its siblings go on."""
    note: EndingNote | None


def ending_of(index: int, completion: CompletionOutput, note: EndingNote | None, num_tokens: int) -> Ending:
    """Ending from a candidate's last output. `num_tokens`: all its output tokens, also those of earlier outputs."""
    note, failed = note or NO_NOTE, completion.finish_reason == "error"
    return Ending(
        index=index,
        state="failed" if failed else note.state,
        num_tokens=num_tokens,
        truncated=completion.finish_reason in TRUNCATED,
        end_step=note.end_step,
        ended_by_itself=not failed and note.ended_by_itself,
        num_preemptions=note.num_preemptions,
    )


class CandidateClient:
    """Mixin before a class that sends single requests (`generate`), such as AsyncLLM."""

    fields_in = "vllm_xargs"
    """Name of the field in which users write our fields."""
    routes: GroupRoutes
    _adapters: AdapterNames

    async def generate_candidate(
        self, tag: CandidateTag, prompt: Any, params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[tuple[RequestOutput, EndingNote | None], None]:
        """Yield one candidate's outputs. The last one comes with the scheduler's note.

        Raises: VLLMValidationError if the named group refused the candidate.
        """
        params.extra_args = {**(params.extra_args or {}), **tag.to_extra_args()}
        async with aclosing(super().generate(prompt, params, request_id, **kwargs)) as outputs:
            async for output in outputs:
                note, output.kv_transfer_params = EndingNote.take(output.kv_transfer_params)
                if note is not None and note.refusal is not None:
                    field, refusal = as_written(note.refusal)
                    raise self._invalid(field, refusal)
                if note is not None:
                    (completion,) = output.outputs
                    mend_weight_spans(completion, note.weights)
                    if note.state in STOP_STATES:  # a stop string in the last token does not make it a winner
                        completion.finish_reason, completion.stop_reason = "abort", note.state
                pad_prompt_logprobs(output)
                yield output, note

    async def run_candidates(
        self,
        group_id: str,
        plan: GroupPlan,
        prompt: Any,
        params: SamplingParams,
        *,
        said: Mapping[str, Any] | None = None,
        observed: bool = True,
        beginnings: Beginnings | None = None,
        outlook: Outlook | None = None,
        data_parallel_rank: int | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[CandidateOutput, None]:
        """Run the candidates of one group. Yields their outputs as they come, in the kind that `params` asks for.

        With `beginnings`, candidates continue from these tokens, and their outputs have the later tokens only.
        `outlook`: the expected lengths, by which a rank is chosen, and the reasons for which the group may move.

        `said`: what each candidate says to parts, by part. Without `observed`, and unless a part observes candidates,
        logits are not observed, and there is no mean confidence.

        A candidate that fails ends with a final output of finish reason `error` or `abort`, or without output.
        Closing the generator aborts the running candidates. Raises errors that concern all candidates: bad parameters,
        a full queue, a dead engine.

        At most three outputs per candidate are held for a slow reader. The queue holds one per candidate. One more
        waits for a place in the queue, and vLLM merges later deltas into a third one.
        """
        if kwargs.get("lora_request") is not None:
            kwargs["lora_request"] = self._adapters.told_apart(kwargs["lora_request"])
        before_each = dict.fromkeys(range(plan.num_candidates), ()) if beginnings is None else beginnings.token_ids
        begun = {index: len(before) for index, before in before_each.items()}
        route = self.routes.open(group_id, begun, data_parallel_rank, outlook)
        # One place per candidate: with fewer, candidates of one step wait for each other, a task switch per output.
        candidates: FanIn[CandidateOutput] = FanIn(plan.num_candidates)
        params = params.clone()
        params.skip_clone = True  # siblings share fields that they only read. Others are copied below
        delta = params.output_kind == RequestOutputKind.DELTA
        interval = (params.stream_interval or 1) if delta else OUTPUT_INTERVAL_TOKENS

        spare_indices = count(plan.num_candidates if beginnings is None else beginnings.next_index)
        namespace = client_namespace()

        async def run(index: int, before: Sequence[int] = ()) -> AsyncGenerator[CandidateOutput, None]:
            its = dict(said or {})
            if before and beginnings is not None:
                its |= resumed_of(plan.parts, its, len(before), beginnings.survival.get(index, 1.0))
            tag = CandidateTag(group_id, index, plan.terms, interval, its, observed, len(before), namespace)
            child = resumed_params(params, len(before))
            child.n = 1
            child.seed = None if params.seed is None else params.seed + index  # as vLLM seeds the n of a request
            whole_prompt = resumed_prompt(prompt, before)
            outputs = self.generate_candidate(
                tag, whole_prompt, child, f"{group_id}-c{index}", data_parallel_rank=data_parallel_rank, **kwargs
            )
            try:
                num_tokens = 0
                async with aclosing(outputs):
                    async for output, note in outputs:
                        num_tokens += len(output.outputs[0].token_ids)
                        yield CandidateOutput(index, output, note)
                        if note is not None and note.is_replaced:  # before it counts as over
                            candidates.add(run(spare := next(spare_indices)))
                            self.routes.begins(route, spare)
                self.routes.ended(route, index, num_tokens)
            except (VLLMClientError, GracefulHTTPError, EngineDeadError, *REJECTIONS):
                raise
            except Exception as error:  # one candidate's failure is not its group's: the reader ends it as failed
                logger.exception("candidate %d of group %s failed", index, group_id)
                cause = error.__cause__ or error  # vLLM's own error has no details
                why = f"{type(cause).__name__}: {cause}"
                yield CandidateOutput(index, None, EndingNote("failed", 0, None, error=why))

        for index, before in before_each.items():
            candidates.add(run(index, before))
        try:
            async for output in candidates:
                yield output
        finally:
            await candidates.close()
            self.routes.close(route)

    def _invalid(self, field: str, message: str) -> VLLMValidationError:
        """The error for a client. `message` begins with the field's name, as the client writes it."""
        return VLLMValidationError(f"{self.fields_in}.{message}", parameter=f"{self.fields_in}.{field}")


class GroupRunner:
    """The service's engine, as far as it runs groups on a client."""

    client: CandidateClient
    parts: list[ApiPart]

    async def run_group(self, order: GroupOrder) -> AsyncGenerator[Happening, None]:
        plan, prompt, stream_tokens = order.plan, order.prompt, order.stream_tokens
        for part in self.parts:
            part.group_begins(order)
        rendered, params, lora = prompt.handle
        params = copy(params)  # run_candidates makes the deep copy
        if params.seed is not None:
            params.seed = seed_for(params.seed, order.seed_name)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        if stream_tokens is not None:
            params.output_kind, params.stream_interval = RequestOutputKind.DELTA, stream_tokens
        indices = range(plan.num_candidates) if order.beginnings is None else order.beginnings.token_ids
        logs = {index: _CandidateLog(index, stream_tokens) for index in indices}
        stream = self.client.run_candidates(
            order.group_id,
            plan,
            rendered,
            params,
            said={**order.said_once, **order.said},
            beginnings=order.beginnings,
            outlook=order.outlook,
            lora_request=lora,
            trace_headers=order.trace_headers,
            priority=order.priority,
        )
        lost: GroupLost | NoRankTakes | None = None
        try:
            async with aclosing(stream) as outputs:
                async for candidate in outputs:
                    if (index := candidate.index) not in logs:  # it takes the place of a lost one
                        logs[index] = _CandidateLog(index, stream_tokens)
                    for happening in logs[index].add(candidate):
                        if isinstance(happening, CandidateEnd):
                            del logs[index]
                        yield happening
        except VLLMClientError as error:
            raise RequestError(str(error)) from error
        except RankDied as death:
            lost = GroupLost(f"rank {death.rank} of the engine died")
        except NoRankLeft as error:
            if not self.client.routes.any_lives:
                raise RequestError(str(error), status=error.http_status) from error
            lost = NoRankTakes(str(error), status=error.http_status)
        except GracefulHTTPError as error:  # the server's own limits, such as --max-num-queued-reqs
            raise RequestError(str(error), status=error.http_status) from error
        except REJECTIONS as error:
            raise RequestError(str(error), status=HTTPStatus.SERVICE_UNAVAILABLE) from error
        except EngineDeadError as error:
            raise engine_stopped() from error
        for log in logs.values():
            for happening in log.failed():
                yield happening
        if lost is not None:
            raise lost


class _CandidateLog:
    """Output of one candidate so far."""

    def __init__(self, index: int, stream_tokens: int | None) -> None:
        """`stream_tokens`: as of `GroupOrder.stream_tokens`."""
        self._index = index
        self._stream_tokens = stream_tokens
        self._token_ids: list[int] = []
        self._logprobs: list[float] | None = None
        self._text = ""
        self._num_sent = 0

    def add(self, candidate: CandidateOutput) -> Iterator[Happening]:
        """Add an output. Yields new tokens if there are enough, and the end."""
        note = candidate.note or NO_NOTE
        if candidate.output is None:
            yield from self.failed(note.error)
            return
        (completion,) = candidate.output.outputs
        self._token_ids += completion.token_ids
        self._text += completion.text
        if isinstance(completion.logprobs, FlatLogprobs):
            self._logprobs = (self._logprobs or []) + sampled_logprobs(completion.logprobs)
        if not candidate.output.finished:
            yield from self._new_tokens(self._stream_tokens)
            return
        yield from self._new_tokens()
        num_tokens = len(self._token_ids)
        its_spans = version_spans(note.weights, num_tokens)
        if candidate.note is None:  # the scheduler did not end it
            its_spans = [asdict(span) for span in weight_spans(completion)]
        yield CandidateEnd(
            ending=ending_of(self._index, completion, note, num_tokens),
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            text=self._text,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            confidence=note.confidence,
            weight_versions=its_spans,
            parts=note.parts,
            is_replaced=note.is_replaced,
            error=note.error,
        )

    def failed(self, error: str | None = None) -> Iterator[Happening]:
        """The end of a candidate that has no last output."""
        yield from self._new_tokens()
        ending = Ending(self._index, "failed", len(self._token_ids))
        yield CandidateEnd(ending, self._token_ids, self._logprobs, self._text, "error", None, None, (), error=error)

    def _new_tokens(self, at_least: int | None = 1) -> Iterator[CandidateTokens]:
        """The tokens that were not sent yet, if there are enough of them and the client reads tokens."""
        offset, num_tokens = self._num_sent, len(self._token_ids)
        if self._stream_tokens is not None and num_tokens - offset >= (at_least or 1):
            self._num_sent = num_tokens
            logprobs = None if self._logprobs is None else self._logprobs[offset:]
            yield CandidateTokens(self._index, offset, self._token_ids[offset:], logprobs)


def sampled_logprobs(flat: FlatLogprobs) -> list[float]:
    """Log probability of the sampled token at each position: the first entry of its range."""
    return [max(flat.logprobs[start], LOWEST_LOGPROB) for start in flat.start_indices]


def pad_prompt_logprobs(output: RequestOutput) -> None:
    """Pad prompt log probabilities with None to one per prompt token, for a request that was stopped before its
    prefill.
    """
    given = output.prompt_logprobs
    if given and (num_missing := len(output.prompt_token_ids or ()) - len(given)) > 0:
        output.prompt_logprobs = [*given, *[None] * num_missing]

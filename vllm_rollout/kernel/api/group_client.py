"""Groups behind vLLM's own endpoints: a request of several choices, or several requests that join a group.

Invariant: a request without our fields takes the client's own path unchanged.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from copy import copy
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from vllm_rollout.adapter.arguments import ArgumentError, argument_checks
from vllm_rollout.adapter.joining import answer_name, first_of_completion, tag_of, too_long
from vllm_rollout.adapter.names import AdapterNames
from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.background import spawn
from vllm_rollout.config import OUTPUT_INTERVAL_TOKENS
from vllm_rollout.kernel.api.candidates import NO_NOTE, CandidateClient, ending_of
from vllm_rollout.kernel.api.claims import AskedRequest, Claim
from vllm_rollout.kernel.api.engine_calls import EngineCalls
from vllm_rollout.kernel.api.group_routes import GroupRoutes
from vllm_rollout.kernel.api.open_paths import refuse_on_open_path
from vllm_rollout.kernel.api.refusals import (
    NO_PROMPT_LOGPROBS,
    pruning_refusal,
    refuse_unwritable,
    refuses_prompt_logprobs,
)
from vllm_rollout.kernel.api.versions import REJECTIONS
from vllm_rollout.kernel.call_table import NAME_CHOICES, NamedChoices
from vllm_rollout.kernel.http.clients import client_namespace
from vllm_rollout.kernel.http.engine import EngineStopped
from vllm_rollout.kernel.http.metrics import LeftBy, Metrics
from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.rules.plan import GroupJoin, GroupPlan, PlanError
from vllm_rollout.kernel.rules.prompt_groups import PromptGroups
from vllm_rollout.kernel.rules.prompt_key import digest_of, joined_id, kept_name
from vllm_rollout.kernel.rules.rewards import AnswerName
from vllm_rollout.kernel.rules.selection import conclude
from vllm_rollout.kernel.rules.terms_port import Origin, TermsPart, pruning_of, said_of
from vllm_rollout.kernel.rules.types import Ending, GroupResult
from vllm_rollout.kernel.wire import TAG_KEY
from vllm_rollout.kernel.xargs import NAMES, audit_ratio_from_xargs, plan_from_xargs, rollout_xargs

LAST_OUTPUT_S = 10.0
"""Longest wait in seconds for the last output of a candidate whose client has left. It takes one step, unless
generation is paused.
"""


class GroupClient(CandidateClient):
    """Mixin before a class that sends single requests (`generate`), such as AsyncLLM."""

    vllm_config: VllmConfig
    engine_core: Any
    num_api_processes: int
    """API processes of the server."""
    client_index: int
    """Number of this API process, from 0."""
    rollout_metrics: Metrics
    claims: Sequence[Claim] = ()
    """Claims of parts, which add theirs once the services are built. A part that needs another one comes before it."""

    def begin_groups(self, routes: GroupRoutes, metrics: Metrics) -> None:
        """Set up the groups. Call this once, before the first request comes."""
        self.routes, self.rollout_metrics = routes, metrics
        self.unread: dict[str, RequestOutputCollector | None] = {}
        """Collectors of the last outputs of candidates whose client has left, by request id. Their tokens are counted.
        """
        self._prompt_groups = PromptGroups()
        self._terms_parts: list[TermsPart] = [part() for _, part in faces("terms")]
        self._adapters = AdapterNames()
        self._argument_checks = argument_checks(self.vllm_config)
        self._refuses_prompt_logprobs = refuses_prompt_logprobs(self.vllm_config)

    @property
    def max_candidates(self) -> int:
        return self.vllm_config.scheduler_config.max_num_seqs

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        if self._refuses_prompt_logprobs and sampling_params.prompt_logprobs is not None:
            raise VLLMValidationError(NO_PROMPT_LOGPROBS, parameter="prompt_logprobs")
        if kwargs.get("lora_request") is not None:
            kwargs["lora_request"] = self._adapters.told_apart(kwargs["lora_request"])
        extra_args = sampling_params.extra_args or {}
        if extra_args:
            refuse_unwritable(extra_args)
            if TAG_KEY in extra_args:
                raise VLLMValidationError(f"extra_args.{TAG_KEY} is set by the server; send rollout_* fields instead.")
            self._check_arguments(extra_args)
        xargs = rollout_xargs(extra_args)
        asked = AskedRequest(prompt, sampling_params, request_id, xargs, kwargs)
        for claim in self.claims:
            if (outputs := claim(asked)) is not None:
                return outputs
        if not xargs:
            return super().generate(prompt, sampling_params, request_id, **kwargs)
        refuse_on_open_path(xargs)
        if isinstance(prompt, AsyncGenerator):
            field = next(iter(xargs))
            raise self._invalid(field, f"{field} is for a request whose prompt comes whole. Leave it out.")
        try:
            plan = plan_from_xargs(xargs, sampling_params.n, max_candidates=self.max_candidates)
            audit_ratio = audit_ratio_from_xargs(xargs, plan, ServeOptions.of(self.vllm_config).audit_ratio)
        except PlanError as error:
            raise self._invalid(error.field, str(error)) from error
        if pruning_of(plan.parts) is not None and (refusal := pruning_refusal(self.vllm_config)) is not None:
            field = NAMES["detection_length"]
            raise self._invalid(field, f"{field}: {refusal}")
        params = copy(sampling_params)
        params.extra_args = {key: value for key, value in extra_args.items() if key not in xargs}
        if isinstance(plan, GroupJoin):
            self._refuse_unnamed(plan)
            return self._generate_joined(plan.with_audits(audit_ratio), prompt, params, request_id, **kwargs)
        lora: LoRARequest | None = kwargs.get("lora_request")
        kind = (lora and lora.lora_name, plan.returns_all)
        first = self.first_of_answer(request_id)
        if audit_ratio and any(part.audits(kind, audit_ratio, request_id, first) for part in self._terms_parts):
            plan = plan.audited()
        return self._generate_choices(plan, prompt, params, request_id, **kwargs)

    def first_of_answer(self, request_id: str) -> str:
        """Id of the first request among those that are answered together with this one."""
        return first_of_completion(request_id)

    def _refuse_unnamed(self, join: GroupJoin) -> None:
        """Raises: VLLMValidationError if siblings may reach another API process, which has other groups. Endpoints that
        join groups pass all such requests to the first process.
        """
        if join.name is None and self.client_index > 0:
            raise self._invalid(
                "rollout_group_id",
                "rollout_group_id: is needed at this endpoint with several API processes, of which the requests of one "
                "prompt may reach different ones. Name each group, or start one process (--api-server-count 1).",
            )

    def _check_arguments(self, extra_args: dict[str, Any]) -> None:
        """Raises: VLLMValidationError if a part cannot read one of its arguments."""
        try:
            for check in self._argument_checks:
                check(extra_args)
        except ArgumentError as error:
            raise VLLMValidationError(f"extra_args.{error}", parameter=f"extra_args.{error.name}") from error

    async def _generate_choices(
        self, plan: GroupPlan, prompt: Any, params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a group for an OpenAI request: exactly n choices.

        The winners are known when the group is over, so a stream gets each choice in one piece.
        """
        started = time.monotonic()
        is_stream = params.output_kind == RequestOutputKind.DELTA
        params.output_kind = RequestOutputKind.FINAL_ONLY
        finals: dict[int, RequestOutput] = {}
        endings: dict[int, Ending] = {}
        group_id = f"{kept_name(request_id)}-{uuid.uuid4().hex[:8]}"
        said = said_of(plan.parts, Origin(group_id, digest_of_prompt(prompt), params.seed))
        stream = self.run_candidates(group_id, plan, prompt, params, said=said, observed=False, **kwargs)
        ids = {index: f"{group_id}-c{index}" for index in range(plan.num_candidates)}
        self.unread.update(dict.fromkeys(ids.values()))
        try:
            async with aclosing(stream) as outputs:
                async for candidate in outputs:
                    if (output := candidate.output) is None:
                        continue
                    (completion,) = output.outputs
                    index, note = candidate.index, candidate.note
                    finals[index] = output
                    endings[index] = ending_of(index, completion, note, len(completion.token_ids))
                    self.rollout_metrics.noted((note or NO_NOTE).parts)
        except (asyncio.CancelledError, GeneratorExit):
            unread = [self.unread[id] for index, id in ids.items() if index not in endings]
            spawn(self._count_left("choices", endings.values(), unread), "a client that left")
            raise
        finally:
            for id in ids.values():
                del self.unread[id]
        for index in range(plan.num_candidates):
            endings.setdefault(index, Ending(index, "failed", 0))
        result = conclude(plan, endings.values())
        self.rollout_metrics.group_over(result, time.monotonic() - started, plan)
        if not finals:
            raise RuntimeError(f"all {plan.num_candidates} candidates of request {request_id} failed")
        indices = chosen(plan, result, finals)
        if plan.pruning is not None:
            name = answer_name(request_id, client_namespace(), plan.group_size)
            await self._name_choices(name, group_id, indices)
        answer = finals[indices[0]]  # its prompt was computed if any candidate's was
        answer.request_id = request_id
        answer.outputs = choices_of(plan, indices, finals)
        answer.finished = True
        if is_stream:
            let_stream(answer)
        yield answer

    async def _count_left(
        self,
        request: LeftBy,
        endings: Iterable[Ending],
        unread: Iterable[RequestOutputCollector | None],
        before: int = 0,
    ) -> None:
        """Count a request whose client has left, once its candidates have ended. `before`: tokens that the client has
        read.
        """
        ended = list(endings)
        for collector in unread:
            num_tokens = before
            with suppress(TimeoutError, EngineDeadError, GracefulHTTPError):
                async with asyncio.timeout(LAST_OUTPUT_S):
                    while collector is not None:
                        output = await collector.get()
                        (completion,) = output.outputs
                        in_deltas = collector.aggregate
                        num_tokens = len(completion.token_ids) + (num_tokens if in_deltas else 0)
                        if output.finished:
                            break
            ended.append(Ending(0, "failed", num_tokens))
        self.rollout_metrics.client_left(request, ended)

    async def _name_choices(self, answer: AnswerName, group_id: str, indices: Sequence[int]) -> None:
        """Name the choices in the engine, so that rewards can refer to them. Does nothing if the engine has stopped."""
        choices = dict(enumerate(indices, start=answer.choice))
        with suppress(EngineStopped):
            await EngineCalls(self).call_all(NAME_CHOICES, NamedChoices(answer.name, group_id, choices))  # type: ignore[arg-type]

    async def _generate_joined(
        self, join: GroupJoin, prompt: Any, params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one of several requests that form a group. They run on one rank."""
        content = digest_of_prompt(prompt)
        lora: LoRARequest | None = kwargs.get("lora_request")
        interval = 1 if params.output_kind != RequestOutputKind.FINAL_ONLY else OUTPUT_INTERVAL_TOKENS
        is_stream = params.output_kind == RequestOutputKind.DELTA
        adapter, pinned_rank = lora and lora.lora_name, kwargs.get("data_parallel_rank")
        if (reason := too_long(request_id)) is not None:
            raise VLLMValidationError(f"request_id: {reason}", parameter="request_id")
        client = client_namespace()
        answer = answer_name(request_id, client, namespace=join.namespace)
        join = replace(join, namespace=f"{client}/{join.namespace}")
        with self._prompt_groups.named(join, content, adapter, pinned_rank) as name:
            group_id = joined_id(join.namespace, name, content, adapter or "")
            tag = tag_of(join, group_id, content, params, answer, output_interval=interval)
            route = self.routes.join(tag.group_id, join.num_candidates, pinned_rank)
            ending, is_finished, refused, left = Ending(0, "failed", 0), False, False, False
            self.unread[request_id] = None
            try:
                async with aclosing(self.generate_candidate(tag, prompt, params, request_id, **kwargs)) as outputs:
                    async for output, note in outputs:
                        (completion,) = output.outputs
                        before = ending.num_tokens if is_stream else 0
                        ending = ending_of(0, completion, note, before + len(completion.token_ids))
                        is_finished = output.finished
                        if note is not None:
                            self.rollout_metrics.noted(note.parts)
                        if is_stream:
                            let_stream(output)
                        yield output
            except (VLLMClientError, GracefulHTTPError, *REJECTIONS):
                refused = True
                raise
            except (asyncio.CancelledError, GeneratorExit):
                left = True
                raise
            finally:
                self.routes.leave_joined(route, refused=refused)
                unread = self.unread.pop(request_id, None)
                if left and not is_finished:
                    spawn(self._count_left("joined", (), [unread], ending.num_tokens), "a client that left")
                elif not refused:
                    self.rollout_metrics.joined_over(ending)


def chosen(plan: GroupPlan, result: GroupResult, finals: Collection[int]) -> list[int]:
    """Indices of the choices, at most `group_size`: the selected candidates, then the others with the most tokens
    first.

    `finals`: indices of candidates that have a last output.
    """
    indices = list(result.selected)
    others = [e for e in result.endings if e.index not in result.selected and e.index in finals]
    others.sort(key=lambda e: (-e.num_tokens, e.index))
    return indices + [e.index for e in others][: plan.group_size - len(indices)]


def choices_of(plan: GroupPlan, indices: Sequence[int], finals: dict[int, RequestOutput]) -> list[CompletionOutput]:
    """Exactly `group_size` choices. Empty choices fill the places without a candidate."""
    choices = []
    for position, index in enumerate(indices):
        (choice,) = finals[index].outputs
        choice.index = position
        choices.append(choice)
    logprobs: list[Any] | None = None if choices[0].logprobs is None else []
    for position in range(len(choices), plan.group_size):
        choices.append(CompletionOutput(position, "", [], None, logprobs, finish_reason="abort"))
    return choices


def digest_of_prompt(prompt: Any) -> str:
    """Digest of a prompt's content: token ids, with the hashes of images and other media.

    Prompts without token ids (embeddings, a stream of inputs) are distinguished only by their type.
    """
    if isinstance(prompt, str):
        return f"text:{digest_of([*map(ord, prompt)])}"
    if not isinstance(prompt, Mapping):
        return type(prompt).__name__
    parts = [digest_of(prompt.get("prompt_token_ids") or ())]
    if "encoder_prompt" in prompt:
        parts += [digest_of_prompt(prompt["encoder_prompt"]), digest_of_prompt(prompt["decoder_prompt"])]
    elif prompt.get("mm_hashes"):
        hashes = {modality: list(items) for modality, items in prompt["mm_hashes"].items()}
        parts.append(json.dumps(hashes, sort_keys=True))
    elif "prompt_token_ids" not in prompt and isinstance(prompt.get("prompt"), str):
        parts.append(digest_of_prompt(prompt["prompt"]))
    return "/".join(parts)


class NoTokens(list[int]):
    """An empty list that is true. vLLM's stream takes an empty false list before the first token for a part of the
    prefill.
    """

    def __bool__(self) -> bool:
        return True


def let_stream(output: RequestOutput) -> None:
    """Let vLLM stream the finish reasons of candidates that were stopped before their first token."""
    for completion in output.outputs:
        if completion.finish_reason is not None and not completion.token_ids:
            completion.token_ids = NoTokens()

"""The engine of the rollout service: vLLM behind the protocol of `kernel/http/engine.py`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from starlette.datastructures import State
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs import EngineInput
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_rollout.adapter.names import learned_name
from vllm_rollout.background import survived
from vllm_rollout.kernel.api.client import UNNAMED_WEIGHTS, RolloutAsyncLLM
from vllm_rollout.kernel.api.continued import prompt_text, resume_refusal, text_of
from vllm_rollout.kernel.api.engine_calls import EngineCalls, engine_stopped
from vllm_rollout.kernel.api.outputs import NO_NOTE, CandidateOutput, ending_of
from vllm_rollout.kernel.api.rank_died import RankDied
from vllm_rollout.kernel.api.sampling import sampling_field, sampling_params
from vllm_rollout.kernel.api.versions import REJECTIONS, version_spans, weight_spans
from vllm_rollout.kernel.call_table import CANCEL_GROUPS, GIVE_UP, LAST_TOKENS, RANK_COUNTS
from vllm_rollout.kernel.http.engine import (
    CandidateEnd,
    CandidateTokens,
    GroupLost,
    GroupOrder,
    Happening,
    Kind,
    PreparedPrompt,
    PromptInput,
    RequestError,
)
from vllm_rollout.kernel.http.ports import ApiPart
from vllm_rollout.kernel.http.slices import Slices
from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.rules.launch import num_launch_places
from vllm_rollout.kernel.rules.prompt_key import seed_for
from vllm_rollout.kernel.rules.types import Ending, RankCounts

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""


class VLLMEngine:
    """Runs the service's groups on a RolloutAsyncLLM."""

    def __init__(self, client: RolloutAsyncLLM, state: State) -> None:
        self.client = client
        self.calls = EngineCalls(client)
        self._models = state.openai_serving_models
        self._renderer = state.online_renderer
        self._default_sampling = client.model_config.get_diff_sampling_param()
        self.parts: list[ApiPart] = []
        for _, part in faces("api"):
            self.parts.append(part(self))
        client.after_version = self._weights_named

    def _weights_named(self, version: str) -> None:
        for part in self.parts:
            part.weights_named(version)

    def part(self, kind: type[Kind]) -> Kind:
        if (found := self.find(kind)) is None:
            raise LookupError(f"no part has {kind.__name__} in this API process")
        return found

    def find(self, kind: type[Kind]) -> Kind | None:
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @property
    def max_num_seqs(self) -> int:
        return self.client.max_candidates

    @property
    def max_model_len(self) -> int:
        return self.client.model_config.max_model_len

    @property
    def num_ranks(self) -> int:
        return self.calls.num_ranks

    @property
    def num_launch_places(self) -> int:
        return num_launch_places(self.max_num_seqs, self.num_ranks, self.client.num_api_processes)

    @property
    def is_busy(self) -> bool:
        """True while several calls belong together: an engine must get all of them or none."""
        return self.calls.is_busy or any(part.is_busy for part in self.parts)

    async def stop(self) -> None:
        """Let parts keep what must outlive the server: in this process, then in the workers."""
        for part in self.parts:
            with survived("what a part keeps at the end"):
                await part.stop()
        await self.client.engine_core.collective_rpc_async("rollout_stop_parts")

    async def prepare(
        self,
        prompts: Sequence[PromptInput],
        model: str | None,
        sampling: dict[str, Any],
        *,
        want_logprobs: bool,
        want_text: bool,
    ) -> tuple[str, list[PreparedPrompt]]:
        await self.client.door.opened()  # a rebuilt engine has lost its weights
        try:
            if (before := self.client.before_rollouts) is not None:
                await before()
        except GracefulHTTPError as error:
            raise RequestError(str(error), status=error.http_status) from error
        except EngineDeadError as error:
            raise engine_stopped() from error
        lora = self._adapter_of(model)
        params = sampling_params(sampling, self._default_sampling, want_logprobs=want_logprobs, want_text=want_text)
        prepared, slices = [], Slices()
        for prompt in prompts:
            await slices.turn()
            rendered = await self._render(prompt)
            token_ids = rendered.get("prompt_token_ids") or []
            if not token_ids:
                raise _bad_prompt(prompt, " is empty after tokenization.")
            limited = self._limited(params, prompt, token_ids)  # type: ignore[arg-type]
            refusal = resume_refusal(limited, rendered)
            prepared.append(
                PreparedPrompt(prompt.id, token_ids, (rendered, limited, lora), limited.max_tokens, refusal)  # type: ignore[arg-type]
            )
        await self._try_out(prepared)
        return model or self._models.model_name(lora), prepared

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
        logs = {index: _CandidateLog(index) for index in indices}
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
        lost: GroupLost | None = None
        try:
            async with aclosing(stream) as outputs:
                async for candidate in outputs:
                    log = logs.get(candidate.index)
                    if log is None:  # it takes the place of a lost one
                        log = logs[candidate.index] = _CandidateLog(candidate.index)
                    log.add(candidate)
                    if log.end is not None:
                        del logs[candidate.index]
                        if stream_tokens is not None and (rest := log.take_chunk(1)) is not None:
                            yield rest
                        yield log.end
                    elif stream_tokens is not None and (chunk := log.take_chunk(stream_tokens)) is not None:
                        yield chunk
        except VLLMClientError as error:
            raise RequestError(str(error)) from error
        except RankDied as death:
            lost = GroupLost(f"rank {death.rank} of the engine died")
        except GracefulHTTPError as error:  # the server's own limits, such as --max-num-queued-reqs
            raise RequestError(str(error), status=error.http_status) from error
        except REJECTIONS as error:
            raise RequestError(str(error), status=HTTPStatus.SERVICE_UNAVAILABLE) from error
        except EngineDeadError as error:
            raise engine_stopped() from error
        for log in logs.values():
            if stream_tokens is not None and (rest := log.take_chunk(1)) is not None:
                yield rest
            yield log.failed()
        if lost is not None:
            raise lost

    def text_of(self, prompt: PreparedPrompt, token_ids: Sequence[int], *, stopped: bool) -> str:
        _, params, _ = prompt.handle
        return text_of(self.client.model_config, prompt.token_ids, params, token_ids, stopped=stopped)

    def prompt_text(self, prompt: PreparedPrompt) -> str:
        _, params, _ = prompt.handle
        return prompt_text(self.client.model_config, prompt.token_ids, params)

    async def current_weight_version(self) -> str | None:
        try:
            version = await self.client.get_weight_version()
        except EngineDeadError as error:
            raise engine_stopped() from error
        return None if version == UNNAMED_WEIGHTS else version

    async def cancel_groups(self, group_ids: Sequence[str]) -> None:
        await self.calls.tell_groups(CANCEL_GROUPS, list(group_ids))

    async def give_up(self, candidates: Mapping[str, Sequence[int]]) -> None:
        await self.calls.tell_groups(GIVE_UP, {group_id: list(each) for group_id, each in candidates.items()})

    async def last_tokens(self, group_id: str) -> list[CandidateTokens]:
        each = await self.calls.call_all(LAST_TOKENS, group_id)
        return [CandidateTokens(*told, logprobs=None) for rank in each for told in rank]

    async def rank_counts(self) -> dict[int, RankCounts]:
        return await self.calls.call_each(RANK_COUNTS, None)

    def adapter_name(self, model: str | None) -> str:
        return learned_name(self._adapter_of(model))

    def _adapter_of(self, model: str | None) -> LoRARequest | None:
        if model is None or self._models.is_base_model(model):
            return None
        if model in self._models.lora_requests:
            return self._models.lora_requests[model]
        served = ", ".join([*(path.name for path in self._models.base_model_paths), *self._models.lora_requests])
        raise RequestError(
            f"model: {model!r} is not served; served here: {served}. Leave the field out to use the first.",
            status=HTTPStatus.NOT_FOUND,
            param="model",
        )

    def _limited(self, params: SamplingParams, prompt: PromptInput, token_ids: Sequence[int]) -> SamplingParams:
        """The parameters with `max_tokens` limited by the context that the prompt leaves. Raises: RequestError."""
        max_model_len = self.max_model_len
        vocab_size = self.client.model_config.get_vocab_size()
        if prompt.prompt_token_ids is not None and max(token_ids) >= vocab_size:
            raise _bad_prompt(
                prompt,
                f": token ids must be in [0, {vocab_size}), got {max(token_ids)}. "
                "Tokenize it with the served model's tokenizer.",
            )
        if len(token_ids) >= max_model_len:
            raise _bad_prompt(
                prompt,
                f" has {len(token_ids)} tokens and must leave room for an answer within max_model_len "
                f"({max_model_len}). Shorten it or start the server with a larger --max-model-len.",
            )
        limited = params.clone()
        limited.max_tokens = get_max_tokens(max_model_len, params.max_tokens, len(token_ids), self._default_sampling)
        return limited

    async def _render(self, prompt: PromptInput) -> EngineInput:
        try:
            if prompt.messages is not None:
                request = ChatCompletionRequest(messages=list(prompt.messages))
                result = await self._renderer.render_chat(request)
                rendered = result if isinstance(result, ErrorResponse) else result[1]
            else:
                text_or_ids = prompt.prompt if prompt.prompt is not None else list(prompt.prompt_token_ids or ())
                rendered = await self._renderer.render_completion(CompletionRequest(prompt=text_or_ids, max_tokens=1))
        except Exception as error:  # a chat template may raise anything: the prompt is to blame
            raise _bad_prompt(prompt, f" cannot be rendered: {_first_line(error)}") from error
        if isinstance(rendered, ErrorResponse):
            raise _bad_prompt(prompt, f": {rendered.error.message}")
        (engine_input,) = rendered
        return engine_input

    async def _try_out(self, prompts: Sequence[PreparedPrompt]) -> None:
        """Run vLLM's own checks on every prompt before anything is launched."""
        tasks = await self.client.get_supported_tasks()
        slices = Slices()
        for prompt in prompts:
            await slices.turn()
            rendered, params, lora = prompt.handle
            try:
                self.client.input_processor.process_inputs(
                    "check", rendered, params, supported_tasks=tasks, lora_request=lora
                )
            except (VLLMClientError, ValueError, TypeError) as error:
                raise RequestError(f"prompt {prompt.id!r}: {error}", param=sampling_field(error)) from error


class _CandidateLog:
    """Output of one candidate so far."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._token_ids: list[int] = []
        self._logprobs: list[float] | None = None
        self._text = ""
        self._num_sent = 0
        self.end: CandidateEnd | None = None

    def add(self, candidate: CandidateOutput) -> None:
        note = candidate.note or NO_NOTE
        if candidate.output is None:
            self.end = self.failed(note.error)
            return
        (completion,) = candidate.output.outputs
        self._token_ids += completion.token_ids
        self._text += completion.text
        if isinstance(completion.logprobs, FlatLogprobs):
            self._logprobs = (self._logprobs or []) + sampled_logprobs(completion.logprobs)
        if candidate.output.finished:
            num_tokens = len(self._token_ids)
            its_spans = version_spans(note.weights, num_tokens)
            if candidate.note is None:  # the scheduler did not end it
                its_spans = [asdict(span) for span in weight_spans(completion)]
            self.end = CandidateEnd(
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

    def take_chunk(self, min_tokens: int) -> CandidateTokens | None:
        """The tokens that were not sent yet, if there are at least `min_tokens` of them."""
        offset = self._num_sent
        if len(self._token_ids) - offset < min_tokens:
            return None
        self._num_sent = len(self._token_ids)
        logprobs = None if self._logprobs is None else self._logprobs[offset:]
        return CandidateTokens(self._index, offset, self._token_ids[offset:], logprobs)

    def failed(self, error: str | None = None) -> CandidateEnd:
        """The end of a candidate that has no last output."""
        ending = Ending(self._index, "failed", len(self._token_ids))
        return CandidateEnd(ending, self._token_ids, self._logprobs, self._text, "error", None, None, (), error=error)


def sampled_logprobs(flat: FlatLogprobs) -> list[float]:
    """Log probability of the sampled token at each position: the first entry of its range."""
    return [max(flat.logprobs[start], LOWEST_LOGPROB) for start in flat.start_indices]


def _bad_prompt(prompt: PromptInput, problem: str) -> RequestError:
    form = "messages" if prompt.messages is not None else "prompt" if prompt.prompt is not None else "prompt_token_ids"
    return RequestError(f"prompt {prompt.id!r}{problem}", param=f"prompts.{prompt.position}.{form}")


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False)[0]
        return f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
    return (str(error) or type(error).__name__).splitlines()[0]

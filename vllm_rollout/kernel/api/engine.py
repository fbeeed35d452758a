"""The engine of the rollout service: vLLM behind the protocol of `kernel/http/engine.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_rollout.adapter.names import learned_name
from vllm_rollout.background import survived
from vllm_rollout.kernel.api.candidates import GroupRunner
from vllm_rollout.kernel.api.client import UNNAMED_WEIGHTS, RolloutAsyncLLM
from vllm_rollout.kernel.api.continued import prompt_text, resume_refusal, text_of
from vllm_rollout.kernel.api.engine_calls import EngineCalls, engine_stopped
from vllm_rollout.kernel.api.sampling import sampling_field, sampling_params
from vllm_rollout.kernel.call_table import NAME_ADAPTER, RANK_COUNTS, WEIGHT_VERSION
from vllm_rollout.kernel.http.engine import Kind, PreparedPrompt, PromptInput, RequestError
from vllm_rollout.kernel.http.ports import ApiPart
from vllm_rollout.kernel.http.slices import Slices
from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.rules.launch import num_launch_places
from vllm_rollout.kernel.rules.prompt_key import kept_name
from vllm_rollout.kernel.rules.types import BASE_MODEL, RankCounts

LOOK_S, NUM_LOOKS = 0.05, 100
"""Seconds between two looks at the name of the weights while ranks have different ones, and the number of looks."""


class VLLMEngine(GroupRunner):
    """Runs the service's groups on a RolloutAsyncLLM."""

    client: RolloutAsyncLLM

    def __init__(self, client: RolloutAsyncLLM, state: State) -> None:
        self.client = client
        self.calls = EngineCalls(client)
        self._models = state.openai_serving_models
        self._renderer = state.online_renderer
        self._default_sampling = client.model_config.get_diff_sampling_param()
        self.parts: list[ApiPart] = []
        for _, part in faces("api"):
            self.parts.append(part(self))

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

    def text_of(self, prompt: PreparedPrompt, token_ids: Sequence[int], *, stopped: bool) -> str:
        _, params, _ = prompt.handle
        return text_of(self.client.model_config, prompt.token_ids, params, token_ids, stopped=stopped)

    def prompt_text(self, prompt: PreparedPrompt) -> str:
        _, params, _ = prompt.handle
        return prompt_text(self.client.model_config, prompt.token_ids, params)

    async def current_weight_version(self, model: str | None = None) -> str | None:
        adapter = BASE_MODEL if model is None else kept_name(model)
        for _ in range(NUM_LOOKS):
            versions = {*await self.calls.call_all(WEIGHT_VERSION, adapter)}
            if len(versions) == 1:
                return None if (version := versions.pop()) == UNNAMED_WEIGHTS else version
            await asyncio.sleep(LOOK_S)  # another API process is naming them: not all ranks have the new name yet
        raise RequestError(
            "the ranks of this server have weights of different names. Name their weights again "
            "(POST /update_weight_version).",
            status=HTTPStatus.CONFLICT,
        )

    async def name_adapter(self, adapter: str, version: str) -> None:
        await self.calls.call_all(NAME_ADAPTER, (adapter, version))
        await self.client.hear_version()

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
            if prompt.messages is not None and prompt.prompt_token_ids is None:
                request = ChatCompletionRequest(messages=list(prompt.messages))
                result = await self._renderer.render_chat(request)
                rendered = result if isinstance(result, ErrorResponse) else result[1]
            else:
                text_or_ids = prompt.prompt if prompt.prompt_token_ids is None else list(prompt.prompt_token_ids)
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


def _bad_prompt(prompt: PromptInput, problem: str) -> RequestError:
    forms = ("prompt_token_ids", "messages", "prompt")
    form = next(form for form in forms if getattr(prompt, form) is not None)
    return RequestError(f"prompt {prompt.id!r}{problem}", param=f"prompts.{prompt.position}.{form}")


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False)[0]
        return f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
    return (str(error) or type(error).__name__).splitlines()[0]

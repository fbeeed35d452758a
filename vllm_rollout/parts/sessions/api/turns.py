"""Turns of sessions on the way to the engine. Each turn is a candidate of its group, and all run on one rank.

Invariant: a turn of an ended session is answered without the engine. A turn that is stopped returns all its tokens.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import wraps
from math import isnan
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from vllm_rollout.config import OUTPUT_INTERVAL_TOKENS
from vllm_rollout.kernel.api.group_client import let_stream
from vllm_rollout.kernel.api.refusals import raise_as_vllms
from vllm_rollout.kernel.api.versions import version_spans
from vllm_rollout.kernel.http.clients import client_namespace
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.parts import face
from vllm_rollout.kernel.rules.rows import PlanError
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.wire import CandidateTag, EndingNote
from vllm_rollout.kernel.xargs import NAMES
from vllm_rollout.parts.sessions.http.asked import client_session, turn_from_xargs
from vllm_rollout.parts.sessions.http.groups import OpenTurn
from vllm_rollout.parts.sessions.http.service import SessionService

MANY = 1 << 40
"""Limit of turns per group, large enough for any group. The group's rank is kept between turns."""
TERMS = GroupTerms(1, 1, early_stop=False)
"""Terms of the engine's group. It decides nothing, and is dropped when no turn runs."""

FULL_TURN = (
    "messages: this turn's prompt fills the context of the model ({}), which leaves no token for an answer. Finish the "
    "session with the reward that it has earned, or send a shorter conversation."
)

SCORED_SAYS = face("sessions", "scored_says")
"""Returns what a scored turn says to pruning. None without pruning, which scores."""


def turn_of(
    service: SessionService, xargs: Mapping[str, object], prompt: Any, params: SamplingParams, model: str | None
) -> OpenTurn | None:
    """The turn of a request. None if its session has ended. Raises: vLLM's error for the status."""
    try:
        said = turn_from_xargs(xargs, client_session(), n=params.n)
        return service.turn(said, model, _tokens_of(prompt))
    except PlanError as error:
        raise VLLMValidationError(f"vllm_xargs.{error}", parameter=f"vllm_xargs.{error.field}") from error
    except RequestError as error:
        raise_as_vllms(error)


async def compared(service: SessionService, turn: OpenTurn, prompt: Any, max_model_len: int) -> Any:
    """The prompt with the token ids of earlier turns. Raises: vLLM's error for the status."""
    try:
        continuation = await service.compare(turn)
    except RequestError as error:
        raise_as_vllms(error)
    if continuation.history == "mended":
        prompt = {**prompt, "prompt_token_ids": list(continuation.token_ids)}
    if len(_tokens_of(prompt) or ()) >= max_model_len:
        raise VLLMValidationError(FULL_TURN.format(f"{max_model_len} tokens"), parameter="messages")
    return prompt


def params_of(params: SamplingParams, turn: OpenTurn) -> SamplingParams:
    """The parameters, with `max_tokens` limited to the tokens that the turn may generate."""
    if turn.max_tokens is not None and (params.max_tokens is None or params.max_tokens > turn.max_tokens):
        params.max_tokens = turn.max_tokens
        params.min_tokens = min(params.min_tokens, turn.max_tokens)
    return params


def options_of(options: Mapping[str, Any], turn: OpenTurn) -> dict[str, Any]:
    """Other arguments of `generate`, with the group's priority unless the request has one of its own."""
    return {**options, "priority": options.get("priority") or turn.group.priority()}


def tag_of(turn: OpenTurn, params: SamplingParams) -> CandidateTag:
    interval = 1 if params.output_kind != RequestOutputKind.FINAL_ONLY else OUTPUT_INTERVAL_TOKENS
    terms, said = TERMS, {}
    if turn.is_scored:
        terms = replace(turn.group.race.plan.terms, early_stop=False, patience=None, num_replaceable=0)
        said = SCORED_SAYS(turn)
    return CandidateTag(turn.engine_id, turn.index, terms, interval, said, observed=False, namespace=client_namespace())


def begin(service: SessionService, turn: OpenTurn) -> bool:
    """Begin the turn, as in `SessionService.begin`. Raises: vLLM's error for the status."""
    try:
        return service.begin(turn)
    except RequestError as error:
        raise_as_vllms(error)


class Heard:
    """Tokens, log probabilities and text that a turn has generated so far, from deltas or whole outputs."""

    def __init__(self, *, in_deltas: bool) -> None:
        self._in_deltas = in_deltas
        self.token_ids: list[int] = []
        self.logprobs: list[float] | None = []
        self.text = ""
        self.finish_reason: str | None = None
        self.prompt: Sequence[int] = ()

    def take(self, output: RequestOutput) -> None:
        (completion,) = output.outputs
        if not self._in_deltas:
            self.token_ids, self.logprobs, self.text = [], [], ""
        self.token_ids += completion.token_ids
        self.text += completion.text
        if completion.logprobs is None or self.logprobs is None:
            self.logprobs = None
        else:
            chosen = zip(completion.token_ids, completion.logprobs, strict=False)
            self.logprobs += [each[token].logprob for token, each in chosen]  # type: ignore[index]
        self.finish_reason = completion.finish_reason
        self.prompt = output.prompt_token_ids or self.prompt


async def ended_at_once(request_id: str, prompt: Any, params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
    """Yield the answer to a turn of a session that has ended."""
    tokens = list(_tokens_of(prompt) or ())
    logprobs: list[Any] | None = None if params.logprobs is None and not params.logprob_token_ids else []
    prompt_logprobs: list[Any] | None = None if params.prompt_logprobs is None else [None] * len(tokens)
    choice = CompletionOutput(0, "", [], None, logprobs, finish_reason="abort", stop_reason="surplus")
    output = RequestOutput(request_id, None, tokens, prompt_logprobs, [choice], finished=True)
    if params.output_kind == RequestOutputKind.DELTA:
        let_stream(output)
    yield output


async def heard(
    service: SessionService,
    turn: OpenTurn,
    outputs: AsyncGenerator[tuple[RequestOutput, EndingNote | None], None],
    *,
    in_deltas: bool,
) -> AsyncGenerator[RequestOutput, None]:
    """Yield the outputs of a turn. The session records the turn's end before the client gets it."""
    said = Heard(in_deltas=in_deltas)
    async with aclosing(outputs):
        async for output, note in outputs:
            said.take(output)
            if output.finished and any(map(isnan, said.logprobs or ())):
                turn.group.saw_bad_weights = True
                service.leave(turn)  # vLLM answers with a 400, because JSON has no NaN: the turn does not count
            elif output.finished:
                service.end(
                    turn,
                    said.prompt,
                    said.token_ids,
                    text=said.text,
                    finish_reason=said.finish_reason,
                    logprobs=said.logprobs,
                    num_cached_tokens=output.num_cached_tokens,
                    weight_versions=() if note is None else version_spans(note.weights, len(said.token_ids)),
                    pruned=note is not None and note.state == "pruned",
                )
            if in_deltas:
                let_stream(output)
            yield output


def _tokens_of(prompt: Any) -> Sequence[int] | None:
    """Token ids of a prompt. None if it is not tokenized yet, or has content beyond tokens."""
    if not isinstance(prompt, Mapping) or "encoder_prompt" in prompt or prompt.get("mm_hashes"):
        return None
    return prompt.get("prompt_token_ids")


def refuse_full_turns(app: Any) -> None:
    """Make vLLM's requests refuse a session's turn that leaves no token for its answer. Call this once per API process.

    vLLM has a message for prompts longer than the context. For a prompt that just fills it, `max_tokens` becomes 0
    before the engine client gets the request.
    """
    for request_class in (ChatCompletionRequest, CompletionRequest):
        if not hasattr(request_class.to_sampling_params, "__wrapped__"):
            refusing = _refusing_full(request_class.to_sampling_params)
            request_class.to_sampling_params = refusing  # type: ignore[method-assign]


def _refusing_full(to_sampling_params: Callable[..., SamplingParams]) -> Callable[..., SamplingParams]:
    @wraps(to_sampling_params)
    def refuse_or_pass(
        request: ChatCompletionRequest | CompletionRequest, max_tokens: int, *args: Any, **kwargs: Any
    ) -> SamplingParams:
        is_turn = NAMES["session"] in (request.vllm_xargs or {}) or client_session() is not None
        if max_tokens == 0 and request.max_tokens != 0 and is_turn:
            raise VLLMValidationError(FULL_TURN.format("max_model_len"), parameter="messages")
        return to_sampling_params(request, max_tokens, *args, **kwargs)

    return refuse_or_pass

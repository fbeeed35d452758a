"""The protocol of `trl vllm-serve` up to TRL 1.10, served by the OpenAI endpoints of the same app, in process.

Invariants: the engine behind those endpoints generates, and all their checks apply: keys, lengths, rollout_* fields in
`generation_kwargs`. No field is dropped silently: a field that has no counterpart is an error. Routes that differ only
by their last slash (/health/, /reset_prefix_cache/) are left to the redirect of the app's routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import httpx
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, StrictInt, StrictStr

from vllm_rollout.server.body import Body
from vllm_rollout.server.boundary import RolloutRoute
from vllm_rollout.server.engine import RequestError
from vllm_rollout.server.serialised import CLIENT_CLOSED_REQUEST, unless_disconnected

PASSED_ON = ("authorization", "x-data-parallel-rank", "x-request-id")

Answer = Mapping[str, Any]
"""The answer of an OpenAI endpoint."""


class Sampling(Body):
    """Fields of both kinds of generation, with the defaults of `trl vllm-serve`."""

    n: Annotated[StrictInt, Field(ge=1)] = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: Annotated[StrictInt, Field(ge=1)] = 16
    logprobs: Annotated[StrictInt, Field(ge=0)] | None = 0
    structured_outputs_regex: str | None = None
    generation_kwargs: dict[str, Any] = Field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """The fields of an OpenAI body. `generation_kwargs`, which are SamplingParams, override fields of the same
        name."""
        names = ("n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens", "logprobs")
        fields = {name: getattr(self, name) for name in names} | self.generation_kwargs
        if "extra_args" in fields:
            fields["vllm_xargs"] = {**fields.pop("extra_args"), **fields.get("vllm_xargs", {})}
        if self.structured_outputs_regex is not None:
            fields["structured_outputs"] = {"regex": self.structured_outputs_regex}
        return {**fields, "return_token_ids": True, "return_tokens_as_token_ids": True}


class GenerateBody(Sampling):
    prompts: Annotated[list[StrictStr] | list[list[StrictInt]], Field(min_length=1)]
    images: list[Any] | None = None

    def completion(self) -> dict[str, Any]:
        """The body of one request to /v1/completions. Raises: RequestError for images, which that endpoint does not
        take."""
        if any(image is not None for image in self.images or ()):
            raise RequestError(
                "images: not supported beside prompts. Send them as messages to /chat/, or use TRL 1.11 or later.",
                param="images",
                status=501,
            )
        return {"prompt": self.prompts, **self.fields()}


class ChatBody(Sampling):
    messages: Annotated[list[list[dict[str, Any]]], Field(min_length=1)]
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None

    def chats(self) -> list[dict[str, Any]]:
        """One body for /v1/chat/completions per conversation."""
        fields = self.fields()
        num_logprobs = fields.pop("logprobs")
        fields |= {"logprobs": num_logprobs is not None, "top_logprobs": num_logprobs}
        if self.chat_template_kwargs:
            fields["chat_template_kwargs"] = self.chat_template_kwargs
        if self.tools:  # the trainer reads calls out of the tokens itself
            fields |= {"tools": self.tools, "tool_choice": "none"}
        return [{"messages": [_with_urls(m) for m in messages], **fields} for messages in self.messages]


def completions_answer(answer: Answer, n: int) -> dict[str, Any]:
    """The answer of `/generate/`: the n choices of each prompt, in the order of the prompts."""
    choices = answer["choices"]
    return _answer([choice["prompt_token_ids"] for choice in choices[::n]], choices, _of_completion)


def chats_answer(answers: Sequence[Answer]) -> dict[str, Any]:
    """The answer of `/chat/`, made from one answer per conversation."""
    choices = [choice for answer in answers for choice in answer["choices"]]
    return _answer([answer["prompt_token_ids"] for answer in answers], choices, _of_chat)


Position = dict[int, float]
"""Log probabilities by token id at one position. The sampled token is among them."""


def _answer(
    prompt_ids: list[list[int]], choices: Sequence[Answer], read: Callable[[Answer], Iterable[Position]]
) -> dict[str, Any]:
    logprobs = token_ids = None
    if choices[0]["logprobs"] is not None:
        ranked = [[sorted(one.items(), key=lambda item: -item[1]) for one in read(c["logprobs"])] for c in choices]
        token_ids = [[[token for token, _ in one] for one in positions] for positions in ranked]
        logprobs = [[[value for _, value in one] for one in positions] for positions in ranked]
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [choice["token_ids"] for choice in choices],
        "logprobs": logprobs,
        "logprob_token_ids": token_ids,
    }


def _of_completion(logprobs: Answer) -> Iterator[Position]:
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        yield {_id(other): one for other, one in (top or {}).items()} | {_id(token): value}


def _of_chat(logprobs: Answer) -> Iterator[Position]:
    for entry in logprobs["content"]:
        yield {_id(top["token"]): top["logprob"] for top in entry["top_logprobs"]} | {
            _id(entry["token"]): entry["logprob"]
        }


def _id(token: str) -> int:
    return int(token.removeprefix("token_id:"))


def _with_urls(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with images in the form that OpenAI endpoints take."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": [_with_url(part) for part in content]}


def _with_url(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") != "image_pil":
        return dict(part)
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{part['image_pil']}"}}


class _Refused(Exception):
    """An OpenAI endpoint has refused the request. Its answer is passed on."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(answer.text)
        self.response = Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


router = APIRouter(route_class=RolloutRoute, include_in_schema=False)


def attach(app: FastAPI) -> None:
    app.include_router(router)


@router.post("/generate/")
async def generate(body: GenerateBody, request: Request) -> Response:
    """Complete prompts, `n` times each."""
    completion = body.completion()

    async def ask() -> dict[str, Any]:
        async with _app_of(request) as app:
            return completions_answer(await _post(app, "/v1/completions", completion), completion["n"])

    return await _answered(request, ask())


@router.post("/chat/")
async def chat(body: ChatBody, request: Request) -> Response:
    """Complete conversations, `n` times each."""
    chats = body.chats()

    async def ask() -> dict[str, Any]:
        async with _app_of(request) as app:
            asked = [asyncio.ensure_future(_post(app, "/v1/chat/completions", chat)) for chat in chats]
            try:
                return chats_answer(await asyncio.gather(*asked))
            finally:
                for one in asked:
                    one.cancel()

    return await _answered(request, ask())


def _app_of(request: Request) -> httpx.AsyncClient:
    """An HTTP client of this app. It passes on the trainer's headers that the server acts on."""
    headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
    transport = httpx.ASGITransport(app=request.app)
    return httpx.AsyncClient(transport=transport, base_url="http://app", headers=headers, timeout=None)


async def _post(app: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    answer = await app.post(path, json=body)
    if answer.status_code != 200:
        raise _Refused(answer)
    parsed: dict[str, Any] = answer.json()
    return parsed


async def _answered(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    """The result of `work` as a response. If the trainer disconnects, cancel `work`."""
    try:
        answer = await unless_disconnected(request.receive, work)
    except _Refused as refused:
        return refused.response
    return Response(status_code=CLIENT_CLOSED_REQUEST) if answer is None else JSONResponse(answer)

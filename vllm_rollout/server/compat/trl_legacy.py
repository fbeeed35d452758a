"""The routes of `trl vllm-serve`, for TRL up to 1.10: they ask the OpenAI endpoints of the same app, in process.

Invariant: what generates is the engine behind those endpoints, with everything that they check (keys, lengths,
rollout_* fields in `generation_kwargs`). Routes that differ by their last slash only (/health/, /reset_prefix_cache/)
are left to the redirect that every route of the app has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import httpx
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from vllm_rollout.server.boundary import RolloutRoute
from vllm_rollout.server.compat.trl_legacy_body import ChatBody, GenerateBody, chats_answer, completions_answer
from vllm_rollout.server.event_stream import CLIENT_CLOSED_REQUEST, unless_disconnected

PASSED_ON = ("authorization", "x-data-parallel-rank", "x-request-id")


class _Refused(Exception):
    """An OpenAI endpoint has said no; its answer is ours."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(answer.text)
        self.response = Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


router = APIRouter(route_class=RolloutRoute, include_in_schema=False)


def attach(app: FastAPI) -> None:
    app.include_router(router)


@router.post("/generate/")
async def generate(body: GenerateBody, request: Request) -> Response:
    """Completions of prompts, `n` of each."""
    completion = body.completion()

    async def ask() -> dict[str, Any]:
        async with _app_of(request) as app:
            return completions_answer(await _post(app, "/v1/completions", completion), completion["n"])

    return await _answered(request, ask())


@router.post("/chat/")
async def chat(body: ChatBody, request: Request) -> Response:
    """Completions of conversations, `n` of each."""
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
    """A client of this very app, which sends what a server acts on in the trainer's request."""
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
    """What `work` gives; nothing, and no more work, when the trainer has gone."""
    try:
        answer = await unless_disconnected(request.receive, work)
    except _Refused as refused:
        return refused.response
    return Response(status_code=CLIENT_CLOSED_REQUEST) if answer is None else JSONResponse(answer)

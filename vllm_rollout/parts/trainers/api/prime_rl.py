"""`--rollout-compat prime-rl`: requests of prime-rl and verifiers that stock vLLM does not answer.

These are weights from a folder, adapters under a fixed name, and liveness. Log probabilities of /inference/v1/generate
also name their token as vLLM did up to 0.31, because verifiers' renderers read them so. Prime-rl's /update_weights has
the same path as vLLM's: the body distinguishes them.

Invariant: other requests reach vLLM unchanged.
"""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_rollout.kernel.http.boundary import RolloutRoute, answer_by_body
from vllm_rollout.parts.trainers.api.shared import KEYS_NEEDED, NoWeights, is_for, load_adapter, load_weights, text_of

LIVENESS_TIMEOUT_S = 30.0
UPDATE_WEIGHTS = "/update_weights"
FROM_FOLDER = "/prime_rl/update_weights"
"""Path that answers a body with `weight_dir`."""
GENERATE = "/inference/v1/generate"
TOKEN_ID = re.compile(rb'"token_id":(\d+)')
"""Pattern of a log probability's token. Inside a string the quotes would be escaped."""

router = APIRouter(include_in_schema=False, route_class=RolloutRoute)


class WeightDir(BaseModel):
    weight_dir: Any = Field(
        description="The folder of a checkpoint, or null for weights that prime-rl's worker extension receives."
    )


class Broadcast(BaseModel):
    """Arguments of the worker extension's `init_broadcaster`."""

    host: str
    port: int
    rank_offset: int
    inference_world_size: int
    timeout: int | float
    quantize_in_weight_transfer: bool = False
    session_id: str = "default"


def attach(app: FastAPI) -> None:
    app.include_router(router)
    app.add_middleware(WeightDirs)
    attach_token_names(app)


def attach_token_names(app: FastAPI) -> None:
    """Add `TokenNames` to the app once. TRL's client reads log probabilities by the same names (`--rollout-compat trl`,
    prompts with images).
    """
    if TokenNames not in (middleware.cls for middleware in app.user_middleware):  # type: ignore[operator]
        app.add_middleware(TokenNames)


@router.post(FROM_FOLDER, dependencies=KEYS_NEEDED)
async def update_weights(body: WeightDir, request: Request) -> JSONResponse:
    """Load weights from a checkpoint's folder. The prefix cache stays: prime-rl salts it with its version."""
    folder = body.weight_dir
    client: AsyncLLM = request.app.state.engine_client
    if folder is None:
        if request.app.state.args.worker_extension_cls:
            await client.collective_rpc("update_weights_from_path", args=(None,))
            return JSONResponse({"status": "ok"})
        return _error(
            HTTPStatus.BAD_REQUEST,
            "weight_dir is null: weights are to come by prime-rl's own broadcast, whose receiver is its worker "
            "extension. Start the server with it (--worker-extension-cls), or set weight_broadcast.type to filesystem.",
        )
    try:
        await load_weights(client, text_of(folder, "weight_dir"))
    except NoWeights as error:  # prime-rl repeats requests that fail on the server's side
        return _error(HTTPStatus.SERVICE_UNAVAILABLE, f"weight_dir {error}")
    return JSONResponse({"status": "ok"})


@router.post("/init_broadcaster", dependencies=KEYS_NEEDED)
async def init_broadcaster(body: Broadcast, request: Request) -> JSONResponse:
    """Call prime-rl's worker extension. Without an extension the answer is 404, which means "no broadcast"
    to prime-rl.
    """
    if not request.app.state.args.worker_extension_cls:
        return _error(HTTPStatus.NOT_FOUND, "no worker extension receives broadcasts (--worker-extension-cls).", None)
    client: AsyncLLM = request.app.state.engine_client
    await client.collective_rpc("init_broadcaster", args=tuple(body.model_dump().values()))
    return JSONResponse({"status": "ok"})


@router.post("/load_lora_adapter", dependencies=KEYS_NEEDED)
async def load_lora_adapter(body: LoadLoRAAdapterRequest, request: Request) -> JSONResponse:
    loaded = await load_adapter(request.app.state.openai_serving_models, body.lora_name, body.lora_path)
    if isinstance(loaded, JSONResponse):
        return loaded
    return JSONResponse({"status": "ok"})


@router.get("/liveness")
async def liveness(request: Request) -> JSONResponse:
    """Check whether the engine's loop carries out calls. Unlike /health this detects an engine that hangs."""
    call = AsyncLLM.collective_rpc(request.app.state.engine_client, "check_health")  # ours would wait for weights
    try:
        async with asyncio.timeout(LIVENESS_TIMEOUT_S):
            await call
    except TimeoutError:
        return JSONResponse({"status": "engine_unresponsive"}, HTTPStatus.SERVICE_UNAVAILABLE)
    return JSONResponse({"status": "ok"})


class WeightDirs:
    """ASGI middleware: /update_weights with `weight_dir` goes to prime-rl's route, others to vLLM."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_for(scope, "POST", UPDATE_WEIGHTS):
            await answer_by_body(partial(self._choose, scope), self._app, scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _choose(self, scope: Scope, body: bytes) -> tuple[ASGIApp, Scope]:
        if names_a_folder(body):
            scope = {**scope, "path": scope.get("root_path", "") + FROM_FOLDER}
        return self._app, scope


def names_a_folder(body: bytes) -> bool:
    """True if a body of /update_weights is prime-rl's."""
    try:
        fields: Any = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and "weight_dir" in fields and "update_info" not in fields


class TokenNames:
    """ASGI middleware: log probabilities of /inference/v1/generate also name their token as `token_id:N`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_for(scope, "POST", GENERATE):
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        parts: list[bytes] = []

        async def send_named(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                if MutableHeaders(scope=message).get("content-type") == "application/json":
                    start = message
                    return
            elif start is not None:
                parts.append(message.get("body", b""))
                if message.get("more_body"):
                    return
                body = TOKEN_ID.sub(rb'"token":"token_id:\1","token_id":\1', b"".join(parts))
                MutableHeaders(scope=start)["content-length"] = str(len(body))
                await send(start)
                message = {**message, "body": body}
            await send(message)

        await self._app(scope, receive, send_named)


def _error(status: HTTPStatus, message: str, field: str | None = "weight_dir") -> JSONResponse:
    error = {"message": message, "type": status.phrase, "param": field, "code": status.value}
    return JSONResponse({"error": error}, status)

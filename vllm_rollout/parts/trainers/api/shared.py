"""Helpers for several trainers: loading of weights and adapters from disk, and choices by a request's body.

Invariant: a folder without weights leaves the model unchanged.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from fastapi import Depends, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.types import Scope
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_rollout.kernel.api.open_paths import has_key
from vllm_rollout.kernel.http.admin import require_admin
from vllm_rollout.kernel.http.clients import path_of
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.weight_files import EXPECTED, has_weights

MAX_BYTES = 4096
"""Most bytes of a path, as on Linux."""


class NoWeights(ValueError):
    """The folder has no weights, or not yet."""


def text_of(value: Any, field: str) -> str:
    """The value of a body's field that names a folder or an adapter. Raises: RequestError (400) if it names none."""
    if not isinstance(value, str) or not value:
        raise RequestError(f"{field} must be a string that is not empty, got {value!r:.200}.", param=field)
    try:
        num_bytes = len(value.encode())
    except UnicodeEncodeError:
        num_bytes = 0
    if "\0" in value or not 0 < num_bytes <= MAX_BYTES:
        raise RequestError(
            f"{field} must be UTF-8 of at most {MAX_BYTES} bytes, without a zero byte, got {value!r:.200}.", param=field
        )
    return value


async def check_weights(folder: str) -> None:
    """Raises: NoWeights."""
    # vLLM prepares the model before it looks for new weights: without a file the model would be left with none.
    try:
        has_some = await asyncio.to_thread(has_weights, folder)
    except OSError as error:
        raise NoWeights(f"{folder} cannot be read: {error.strerror}. Name a folder of this host.") from error
    if not has_some:
        raise NoWeights(f"{folder} has {EXPECTED} on this host, or not yet. Send it again.")


async def load_weights(client: AsyncLLM, folder: str) -> None:
    """Replace the model's weights by a checkpoint's. Raises: NoWeights."""
    await check_weights(folder)
    await client.collective_rpc("reload_weights", kwargs={"weights_path": folder})


async def load_adapter(models: OpenAIServingModels, name: str, folder: str) -> JSONResponse | int:
    """Load an adapter as vLLM's /v1/load_lora_adapter does. A name that exists gets the new weights.

    Returns the adapter's number, or the answer with the reason why it was not loaded. Raises: RequestError (400).
    """
    name, folder = text_of(name, "lora_name"), text_of(folder, "lora_path")
    body = LoadLoRAAdapterRequest(lora_name=name, lora_path=folder, load_inplace=True)
    answer = await models.load_lora_adapter(body)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), answer.error.code)
    return models.lora_requests[name].lora_int_id


def is_for(scope: Scope, method: str, path: str) -> bool:
    """True if a request has this method and path of vLLM's app, without a proxy's prefix."""
    return scope["type"] == "http" and scope["method"] == method and path_of(scope) == path


def require_keys(request: Request) -> None:
    """Raises: HTTPException (401) if --api-key or --rollout-admin-key is set and the request lacks it."""
    if not has_key(request.app, request.headers):
        raise HTTPException(
            HTTPStatus.UNAUTHORIZED,
            "authorization: needs a key that the server was given as --api-key, as a bearer token.",
        )
    try:
        require_admin(request)
    except RequestError as error:
        raise HTTPException(error.status, str(error)) from error


KEYS_NEEDED = [Depends(require_keys)]
"""FastAPI dependencies of a trainer's route that changes something."""

"""`--rollout-compat skyrl`: requests of SkyRL's client that stock vLLM answers differently or not at all.

These are adapters under a fixed name, and /reset_prefix_cache with its field in a JSON body. vLLM reads only the query
and would keep the running requests' cache. SkyRL's /skyrl/v1/generate, for routed experts, is not here.

Invariant: other requests reach vLLM unchanged.
"""

from __future__ import annotations

import json
from functools import partial
from urllib.parse import urlencode

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_rollout.kernel.http.boundary import RolloutRoute, answer_by_body
from vllm_rollout.parts.trainers.api.shared import KEYS_NEEDED, is_for, load_adapter

RESET = "/reset_prefix_cache"
FIELD = "reset_running_requests"

router = APIRouter(include_in_schema=False, route_class=RolloutRoute, dependencies=KEYS_NEEDED)


class LoadAdapter(BaseModel):
    lora_name: str
    lora_path: str


def attach(app: FastAPI) -> None:
    app.include_router(router)
    app.add_middleware(ResetBody)


@router.post("/skyrl/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadAdapter, request: Request) -> JSONResponse:
    loaded = await load_adapter(request.app.state.openai_serving_models, body.lora_name, body.lora_path)
    if isinstance(loaded, JSONResponse):
        return loaded
    return JSONResponse({"status": "ok", "lora_name": body.lora_name, "lora_int_id": loaded})


class ResetBody:
    """ASGI middleware: moves the field of /reset_prefix_cache from the body to the query."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_for(scope, "POST", RESET):
            await answer_by_body(partial(self._choose, scope), self._app, scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _choose(self, scope: Scope, body: bytes) -> tuple[ASGIApp, Scope]:
        if (query := query_of(body)) is not None and FIELD.encode() not in scope["query_string"]:
            scope = {**scope, "query_string": b"&".join(filter(None, (scope["query_string"], query)))}
        return self._app, scope


def query_of(body: bytes) -> bytes | None:
    """The body's field as a query, or None if it is missing."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or FIELD not in fields:
        return None
    value = fields[FIELD]
    # vLLM refuses what is no boolean, also in place of a lone surrogate
    return urlencode({FIELD: json.dumps(value) if isinstance(value, bool) else value}, errors="replace").encode()

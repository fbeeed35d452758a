"""Where vLLM's --api-key does not reach. Invariant: our fields work nowhere that the key does not guard.

vLLM guards the paths that begin with one of its prefixes; /invocations generates without a key. A server without
--api-key takes our fields in the same places, so that a key changes nothing but who may come in.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX
from vllm.exceptions import VLLMValidationError

from vllm_rollout.server.paths import path_of

_open_path: ContextVar[str | None] = ContextVar("open_path", default=None)
"""The path of the request that is being answered, where no key guards it."""


class OpenPaths:
    """ASGI middleware that notes requests which no key guards, by the rule of vLLM's own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            path = path_of(scope)
            _open_path.set(None if path.startswith(GUARDED_PREFIX) else path)
        await self._app(scope, receive, send)


def refuse_on_open_path(fields: Iterable[str]) -> None:
    """Raises: VLLMValidationError (400) for our fields in a request that no key guards."""
    if (path := _open_path.get()) is None:
        return
    field = f"vllm_xargs.{next(iter(fields))}"
    raise VLLMValidationError(
        f"{field}: rollout fields are not taken on {path}, which --api-key does not guard. Send the request to "
        "/v1/completions, /v1/chat/completions or /inference/v1/generate.",
        parameter=field,
    )

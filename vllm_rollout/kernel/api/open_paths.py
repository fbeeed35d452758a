"""Paths that vLLM's --api-key does not guard.

Invariant: our fields work on guarded paths only. Trainers' routes that change something need the same keys as our own
endpoints.

vLLM guards the paths that begin with one of its prefixes. /invocations generates without a key. A server without
--api-key takes our fields on the same paths.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from contextvars import ContextVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX, AuthenticationMiddleware
from vllm.exceptions import VLLMValidationError

from vllm_rollout.kernel.http.clients import namespace_of, path_of

_open_path: ContextVar[str | None] = ContextVar("open_path", default=None)
"""Path of the current request if no key guards it, else None."""


class OpenPaths:
    """ASGI middleware that marks requests on paths without a key, by vLLM's own rule."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            path = path_of(scope)
            _open_path.set(None if path.startswith(GUARDED_PREFIX) else path)
        await self._app(scope, receive, send)


def refuse_on_open_path(fields: Iterable[str]) -> None:
    """Raises: VLLMValidationError (400) for our fields in a request on a path without a key."""
    if (path := _open_path.get()) is None:
        return
    field = f"vllm_xargs.{next(iter(fields))}"
    raise VLLMValidationError(
        f"{field}: rollout fields are not taken on {path}, which --api-key does not guard. Send the request to "
        "/v1/completions, /v1/chat/completions or /inference/v1/generate.",
        parameter=field,
    )


def keys_of(settings: Namespace) -> list[str]:
    """API keys by vLLM's rule: those of --api-key, or VLLM_API_KEY."""
    return [key for key in (settings.api_key or [envs.VLLM_API_KEY]) if key]


def keyless_namespace(settings: Namespace) -> str:
    """The namespace of the server's first key, which gets runs and feeds that were made without a key. Empty without a
    key."""
    keys = keys_of(settings)
    return namespace_of(f"Bearer {keys[0]}") if keys else ""


def has_key(app: Starlette, headers: Headers) -> bool:
    """True if the request has --api-key, or the server has none."""
    return all(
        AuthenticationMiddleware(app, **middleware.kwargs).verify_token(headers)  # type: ignore[arg-type]
        for middleware in app.user_middleware
        if middleware.cls is AuthenticationMiddleware  # type: ignore[comparison-overlap]
    )

"""Gauges that are read from the engine are up to date when somebody looks at /metrics.

Without it they would be set at the end of rollouts only, and nobody would see what waits for a trainer that sends
requests of its own, or has died. Invariant: /metrics answers, whatever the engine does.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_rollout.background import spawn
from vllm_rollout.server.paths import path_of

PATIENCE_S = 1.0
"""A scrape waits this long for the engine; then it shows what was known before."""


class FreshGauges:
    """ASGI middleware before /metrics."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._refreshing: asyncio.Task[Any] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and path_of(scope) == "/metrics":
            if self._refreshing is None or self._refreshing.done():
                self._refreshing = spawn(scope["app"].state.rollout_service.refresh_gauges(), "gauges")
            await asyncio.wait({self._refreshing}, timeout=PATIENCE_S)
        await self._app(scope, receive, send)

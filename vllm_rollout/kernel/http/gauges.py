"""Metrics that are read from the engine, refreshed when /metrics is read and after a rollout.

Otherwise they would only be set at the end of rollouts. Groups that wait for a trainer would not show, although the
trainer may have died or may send its requests itself.

Invariant: /metrics answers, whatever the engine does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_rollout.background import spawn
from vllm_rollout.config import REPORT_INTERVAL_S
from vllm_rollout.kernel.http.clients import path_of
from vllm_rollout.kernel.http.engine import Engine, EngineStopped
from vllm_rollout.kernel.http.metrics import Metrics

PATIENCE_S = 1.0
"""Seconds that a scrape waits for the engine. After that it shows the last known values."""


class EngineGauges:
    """Metrics of one engine. The engine is read at most once in `REPORT_INTERVAL_S` seconds."""

    def __init__(self, engine: Engine, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._engine, self._metrics, self._clock = engine, metrics, clock
        self._read_s: float | None = None

    async def refresh(self) -> None:
        now = self._clock()
        if self._read_s is not None and now - self._read_s < REPORT_INTERVAL_S:
            return
        self._read_s = now
        try:
            await self._metrics.refresh(self._engine)
        except EngineStopped:  # reported elsewhere
            return


class FreshGauges:
    """ASGI middleware that refreshes gauges before /metrics is read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._refreshing: asyncio.Task[Any] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and path_of(scope) == "/metrics":
            if self._refreshing is None or self._refreshing.done():
                self._refreshing = spawn(scope["app"].state.rollout_service.gauges.refresh(), "gauges")
            await asyncio.wait({self._refreshing}, timeout=PATIENCE_S)
        await self._app(scope, receive, send)

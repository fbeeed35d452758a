"""The app around a FakeEngine, and three ways to it: in process, over a socket, with our clients."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Response
from prometheus_client import CollectorRegistry, generate_latest
from starlette.routing import BaseRoute

from tests.kernel.http.fake_engine import MODEL, FakeEngine
from tests.support.waiting import wait_until
from vllm_rollout import RolloutClient
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.http.routes import router
from vllm_rollout.kernel.http.service import RolloutService

DEADLINE_S = 60.0


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def app(engine: FakeEngine) -> FastAPI:
    return make_app(engine)


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """In process; what parts do beside requests ends with the test."""
    async with http_of(app) as http:
        yield http
    for part in app.state.engine.parts.values():
        await part.stop()


def make_app(engine: FakeEngine, *, audit_ratio: float = 0.0, **settings: Any) -> FastAPI:
    """The app with the services of the kernel and of the parts that are there. `settings`: for the fakes of parts."""
    app = FastAPI()
    app.state.engine = engine
    app.router.routes += routes()
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for part in engine.parts.values():
        part.begin(metrics, settings)
    app.state.rollout_service = RolloutService(engine, metrics, audit_ratio=audit_ratio)
    for part in engine.parts.values():
        part.serve(app)
    app.state.healthy = True

    @app.get("/health", include_in_schema=False)
    async def health() -> Response:
        return Response(status_code=200 if app.state.healthy else 503)

    @app.get("/v1/models", include_in_schema=False)
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [{"id": MODEL, "object": "model"}]}

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain")

    return app


@cache
def routes() -> list[BaseRoute]:
    """All routes, made once: making them takes longer than most tests."""
    app = FastAPI(openapi_url=None)
    app.include_router(router)
    return app.routes


def http_of(app: FastAPI) -> httpx.AsyncClient:
    """A client of the app in this process."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def events_of(http: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    """Events of a stream. Its text may have line ends of Unicode, which end no event."""
    lines = (await http.post(path, json={**body, "stream": True})).text.split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@pytest.fixture
def server_url(app: FastAPI) -> Iterator[str]:
    """A real server on a free port."""
    with serving(app) as url:
        yield url


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        listener.close()
    assert not thread.is_alive()


@pytest.fixture
def client(server_url: str) -> Iterator[RolloutClient]:
    with RolloutClient(server_url) as client:
        yield client

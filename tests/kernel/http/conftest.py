"""The app around a FakeEngine, and three ways to it: in process, over a socket, with our clients."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Response
from prometheus_client import CollectorRegistry, generate_latest

from tests.kernel.http.fake_engine import MODEL, FakeEngine
from tests.support.waiting import wait_until
from vllm_rollout import RolloutClient
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.http.routes import router
from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.parts.feeds.http.service import FeedService
from vllm_rollout.parts.page.http.part import PagePart
from vllm_rollout.parts.page.http.recorder import TraceRecorder
from vllm_rollout.parts.pruning.http.plan import LearningPlan
from vllm_rollout.parts.rewards.http.plan import RewardsPlan
from vllm_rollout.parts.rewards.http.service import Graders, GradingService, RewardsPart
from vllm_rollout.parts.rounds.http.service import RunService
from vllm_rollout.parts.rounds.http.store import RunStore
from vllm_rollout.parts.rounds.with_shaping.http.parallelism import Parallelism
from vllm_rollout.parts.sessions.http.service import SessionService
from vllm_rollout.parts.sessions.with_page.http.seen import observers

DEADLINE_S = 60.0


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def app(engine: FakeEngine) -> FastAPI:
    return make_app(engine)


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """In process; what ticks for groups of sessions ends with the test."""
    async with http_of(app) as http:
        yield http
    for task in app.state.session_service._tasks:
        task.cancel()


class Clock:
    """A clock that a test sets, in seconds."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(app: FastAPI, clock: Clock) -> SessionService:
    """A session service in a test's own time."""
    service: SessionService = app.state.session_service
    service._clock = clock
    return service


def make_app(
    engine: FakeEngine,
    recorder: TraceRecorder | None = None,
    database: Path | None = None,
    make_parallelism: Callable[[Metrics], Parallelism] | None = None,
    audit_ratio: float = 0.0,
    graders: Graders | None = None,
) -> FastAPI:
    app = FastAPI()
    app.include_router(router)
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    page, rewards = PagePart(engine), RewardsPart(engine)
    page.recorder, rewards.grading = recorder, GradingService(graders, metrics)
    engine.parts = [page, rewards]
    app.state.rollout_service = RolloutService(engine, metrics, audit_ratio=audit_ratio)
    app.state.session_service = SessionService(
        engine.give_up,
        app.state.rollout_service.part(RewardsPlan).grading,
        app.state.rollout_service.rewards,
        metrics,
        lambda tokens: "".join(map(chr, tokens)),
        pruning_refusal=lambda: app.state.rollout_service.part(LearningPlan).learning.pruning_refusal,
        observers=observers(app.state.rollout_service),
    )
    app.state.feed_service = FeedService(app.state.rollout_service, engine, metrics)
    app.state.run_service = RunService(app.state.rollout_service, engine, RunStore(database), metrics)
    app.state.run_service.sessions = app.state.session_service
    app.state.run_service.length_history = lambda *asked: engine.shaping.length_history(*asked)
    if make_parallelism is not None:
        app.state.run_service.resize_by(make_parallelism(metrics))
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

"""The part in the API process: feeds, which are in the first one."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from fastapi import FastAPI

from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.kernel.api.open_paths import keyless_namespace
from vllm_rollout.kernel.http.ports import ApiPart
from vllm_rollout.kernel.parts import face
from vllm_rollout.parts.feeds.http.service import FeedService
from vllm_rollout.parts.feeds.http.store import FEEDS, FeedStore


class FeedsApi(ApiPart):
    """Overrides: start, serve."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine
        self._store: FeedStore | None = None

    async def start(self, settings: Namespace) -> None:
        if settings.rollout_state is not None and not self._engine.client.client_index:
            self._store = FeedStore(Path(settings.rollout_state) / FEEDS, keyless=keyless_namespace(settings))

    def serve(self, app: FastAPI) -> None:
        client = self._engine.client
        if not client.client_index:
            rollouts, metrics = app.state.rollout_service, client.rollout_metrics
            feeds = app.state.feed_service = FeedService(
                rollouts,
                self._engine,
                metrics,
                self._store,
                sessions=lambda: getattr(app.state, "session_service", None),
            )
            client.after_version.append(feeds.hear)
            if (show := face("feeds", "shown")) is not None:
                show(rollouts, feeds)

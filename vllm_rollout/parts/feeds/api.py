"""The part in the API process: feeds, which are in the first one."""

from __future__ import annotations

from fastapi import FastAPI

from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.kernel.http.ports import ApiPart
from vllm_rollout.parts.feeds.http.service import FeedService


class FeedsApi(ApiPart):
    """Overrides: serve, weights_named."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine
        self._feeds: FeedService | None = None

    def serve(self, app: FastAPI) -> None:
        client = self._engine.client
        if not client.client_index:
            self._feeds = FeedService(app.state.rollout_service, self._engine, client.rollout_metrics)
            app.state.feed_service = self._feeds

    def weights_named(self, version: str) -> None:
        if self._feeds is not None:
            self._feeds.weights_named(version)

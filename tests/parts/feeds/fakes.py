"""Feeds of the fake engine's app."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from tests.kernel.http.fake_engine import FakePart
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.parts.feeds.http.service import FeedService


class FakeFeeds(FakePart):
    """Feeds that end with the app."""

    def begin(self, metrics: Metrics, settings: Mapping[str, Any]) -> None:
        self._metrics = metrics

    def serve(self, app: FastAPI) -> None:
        app.state.feed_service = FeedService(
            app.state.rollout_service,
            self.engine,
            self._metrics,
            sessions=lambda: getattr(app.state, "session_service", None),
        )


FAKE = FakeFeeds

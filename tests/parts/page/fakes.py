"""The page of the fake engine's app."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.kernel.http.fake_engine import FakePart
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.parts.page.http.part import PagePart


class FakePage(FakePart, PagePart):
    """Records if the app has a `recorder`."""

    def begin(self, metrics: Metrics, settings: Mapping[str, Any]) -> None:
        self.recorder = settings.get("recorder")


FAKE = FakePage

"""The part in the API process: the recording of --rollout-record, and the page."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from fastapi import FastAPI

from vllm_rollout.kernel.http.ports import ApiPart
from vllm_rollout.parts.page.http.recorder import TraceRecorder


class PagePart(ApiPart):
    """Overrides: start, serve."""

    recorder: TraceRecorder | None = None
    """None: nothing is recorded."""
    is_shown = True
    """True: the page is served."""

    async def start(self, settings: Namespace) -> None:
        self.is_shown = settings.enable_rollout_page
        if settings.rollout_record is not None:
            self.recorder = TraceRecorder(Path(settings.rollout_record), settings.rollout_record_max_mib << 20)

    def serve(self, app: FastAPI) -> None:
        app.state.rollout_page = self.is_shown

"""Rounds of sessions in the API process that has both."""

from __future__ import annotations

from fastapi import FastAPI

from vllm_rollout.kernel.http.ports import ApiPart


class SessionRoundsApi(ApiPart):
    """Overrides: serve."""

    def serve(self, app: FastAPI) -> None:
        if hasattr(app.state, "run_service"):
            app.state.run_service.sessions = app.state.session_service

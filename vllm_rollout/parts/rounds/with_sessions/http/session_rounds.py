"""Preparation and checks of rounds of sessions. Invariant: no prompts are taken here."""

from __future__ import annotations

import time
import uuid
from typing import Any

from vllm_rollout.kernel.http.clients import client_namespace
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.parsed import read_json
from vllm_rollout.parts.rounds.http.body import RoundRequest, RunRequest
from vllm_rollout.parts.rounds.http.stored import PlannedRound
from vllm_rollout.parts.rounds.rules.round_progress import RoundProgress
from vllm_rollout.parts.rounds.with_sessions.http.answers import (
    ReturnedEvent,
    SessionRoundAnswer,
    SessionRoundDoneEvent,
    SessionRoundEvent,
)
from vllm_rollout.parts.rounds.with_sessions.http.session_round import SessionRound, SessionTerms
from vllm_rollout.parts.sessions.http.service import SessionService

__all__ = ["ReturnedEvent", "SessionRoundAnswer", "SessionRoundDoneEvent", "SessionRoundEvent", "check", "prepared"]
"""The names that `of_sessions` is asked for."""


def check(sessions: SessionService, request: RunRequest) -> None:
    """Check a run of sessions. Raises: RequestError if no short round of it could run."""
    its, num_prompts = _terms(request, is_long=False).request("check"), request.terms.num_prompts
    sessions.check_together(its, num_prompts, f"{num_prompts} prompts of a short round", "prompts_per_round")


def prepared(
    sessions: SessionService, planned: PlannedRound, request: RoundRequest, prompts: list[str], *, filters: bool
) -> SessionRound:
    """A round of sessions that is ready to run. `prompts`: bodies as JSON, by position. Raises: RequestError."""
    stored, opened = planned.stored, planned.opened
    said = [*request.rollout_fields(), *(["stream_tokens"] if request.stream_tokens is not None else [])]
    if said:
        raise RequestError(
            f"{said[0]}: cannot be said of a round that consists of sessions: each turn says how it samples, and is "
            "answered to whoever asks it. Leave it out; what groups have in common says the run, in sessions.",
            param=said[0],
        )
    terms = _terms(stored.request, is_long=opened.kind == "long")
    sessions.check_room(len(opened.entries) * sessions.check(terms.request("check")))
    bodies: list[dict[str, Any]] = [read_json(prompt.encode()) for prompt in prompts]
    return SessionRound(
        id=f"round-{uuid.uuid4().hex}",
        run_name=stored.name,
        progress=RoundProgress(opened, filters),
        created=int(time.time()),
        model=stored.model,
        namespace=client_namespace(),
        terms=terms,
        prompts=[{name: value for name, value in body.items() if value is not None} for body in bodies],
        sessions=sessions,
    )


def _terms(request: RunRequest, *, is_long: bool) -> SessionTerms:
    """Terms of a round's groups. A long round has no spare sessions."""
    assert request.sessions is not None
    size = request.group_size
    return SessionTerms(request.sessions, size, 0 if is_long else request.num_candidates(size) - size)

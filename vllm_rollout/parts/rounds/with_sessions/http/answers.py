"""Answers and events of rounds whose candidates are sessions (docs/guides/agents.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from vllm_rollout.kernel.http.answers import ErrorEvent
from vllm_rollout.parts.rounds.http.answers import DeferredEvent, FilteredEvent, RoundEvent, RoundSummary
from vllm_rollout.parts.sessions.http.body import DeclaredEvent, PromptSessions, SessionEvent


class SessionRoundSummary(RoundSummary):
    """A finished round of sessions, without its groups."""

    id: str
    created: int
    model: str
    generated_tokens: int
    """Tokens of all sessions, including sessions of prompts that are not returned."""
    returned_tokens: int
    seconds: float


class SessionRoundAnswer(SessionRoundSummary):
    object: Literal["session.round"] = "session.round"
    groups: list[PromptSessions]


class ReturnedEvent(PromptSessions):
    """A group is over, and the round returns it."""

    type: Literal["group"] = "group"


class UnstartedEvent(BaseModel):
    """Enough other groups are complete, and no session of this prompt had begun. The prompt is among the first of
    the next short round."""

    type: Literal["unstarted"] = "unstarted"
    prompt_id: str
    group_id: str


class SessionRoundDoneEvent(SessionRoundSummary):
    """The round is over, and its outcome is saved."""

    type: Literal["done"] = "done"


SessionRoundEvent = (
    RoundEvent
    | DeclaredEvent
    | SessionEvent
    | ReturnedEvent
    | DeferredEvent
    | UnstartedEvent
    | FilteredEvent
    | SessionRoundDoneEvent
    | ErrorEvent
)

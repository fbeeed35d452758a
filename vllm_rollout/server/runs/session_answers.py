"""Answers and events of rounds whose candidates are sessions (docs/guides/agents.md)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from vllm_rollout.group.types import GroupStatus
from vllm_rollout.server.answers import DeferredEvent, ErrorEvent, FilteredEvent, RoundEvent, RoundSummary
from vllm_rollout.server.sessions.body import SessionAnswer, SessionEvent, TrajectoryAnswer


class SessionRoundGroup(BaseModel):
    """What a round returns of a prompt."""

    prompt_id: str
    group_id: str
    prompt: dict[str, Any] = {}
    """As it was handed in."""
    status: GroupStatus
    reason: str | None
    """Why it is not complete."""
    trajectories: list[TrajectoryAnswer]
    sessions: list[SessionAnswer]
    """The others that had begun."""
    generated_tokens: int
    returned_tokens: int
    seconds: float


class SessionRoundSummary(RoundSummary):
    """What is said of a round that is over, beside its groups."""

    id: str
    created: int
    model: str
    generated_tokens: int
    """In all sessions, also those of prompts that are not returned."""
    returned_tokens: int
    seconds: float


class SessionRoundAnswer(SessionRoundSummary):
    object: Literal["session.round"] = "session.round"
    groups: list[SessionRoundGroup]


class DeclaredEvent(BaseModel):
    """The sessions of a prompt are to begin."""

    type: Literal["declared"] = "declared"
    prompt_id: str
    group_id: str
    to_begin: list[str]
    """Ids of its sessions."""
    prompt: dict[str, Any]
    """As it was handed in, in this round or an earlier one."""


class ReturnedEvent(SessionRoundGroup):
    """A group is over, and the round returns it."""

    type: Literal["group"] = "group"


class UnstartedEvent(BaseModel):
    """Enough others are complete, and no session of this prompt had begun: it is among the first of the next short
    round."""

    type: Literal["unstarted"] = "unstarted"
    prompt_id: str
    group_id: str


class SessionRoundDoneEvent(SessionRoundSummary):
    """The round is over, and what it made of its prompts is kept."""

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

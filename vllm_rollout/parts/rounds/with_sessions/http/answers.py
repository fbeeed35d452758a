"""Answers and events of rounds whose candidates are sessions (docs/guides/agents.md)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from vllm_rollout.kernel.http.answers import ErrorEvent
from vllm_rollout.kernel.rules.types import GroupStatus
from vllm_rollout.parts.rounds.http.answers import DeferredEvent, FilteredEvent, RoundEvent, RoundSummary
from vllm_rollout.parts.sessions.http.body import SessionAnswer, SessionEvent, TrajectoryAnswer


class SessionRoundGroup(BaseModel):
    """A group that a round returns, with its prompt and its sessions."""

    prompt_id: str
    group_id: str
    prompt: dict[str, Any] = {}
    """The prompt as it was handed in."""
    status: GroupStatus
    reason: str | None
    """Reason why the group is not complete. Null if it is."""
    trajectories: list[TrajectoryAnswer]
    sessions: list[SessionAnswer]
    """Sessions that had begun and are not among the trajectories."""
    generated_tokens: int
    returned_tokens: int
    seconds: float


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
    groups: list[SessionRoundGroup]


class DeclaredEvent(BaseModel):
    """The sessions of a prompt are to begin."""

    type: Literal["declared"] = "declared"
    prompt_id: str
    group_id: str
    to_begin: list[str]
    """Ids of the prompt's sessions."""
    prompt: dict[str, Any]
    """The prompt as it was handed in, in this round or an earlier one."""


class ReturnedEvent(SessionRoundGroup):
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

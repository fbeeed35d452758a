"""Answers and events of feeds whose candidates are sessions (docs/guides/agents.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from vllm_rollout.parts.feeds.http.born import BornFields
from vllm_rollout.parts.sessions.http.body import DeclaredEvent, GroupOverEvent, PromptSessions, SessionEvent


class SessionFeedGroup(PromptSessions, BornFields):
    """A complete group of sessions. `weight_versions` of a turn are the versions of its tokens."""


class HarnessEvent(BaseModel):
    """The groups that this harness runs now. They follow as `declared`, and it cancels all others that it runs."""

    type: Literal["harness"] = "harness"
    groups: list[str]
    """Ids of the groups."""


SessionFeedEvent = HarnessEvent | DeclaredEvent | SessionEvent | GroupOverEvent

"""Events of the feed, live and from a file, and the texts of a group."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import BaseModel

from vllm_rollout.parts.shaping.rules.trace import End

NAMES = ("server", "rollout", "group", "rewards", "ranks", "round", "sessions", "feeds", "gone")
COMMENT = b": \n\n"
"""Keeps the connection open and carries no data."""
SCHEMA: dict[str, Any] = {
    "itemSchema": {
        "type": "object",
        "required": ["event", "data"],
        "properties": {"event": {"enum": NAMES}, "data": {"type": "string", "contentMediaType": "application/json"}},
    }
}
"""OpenAPI's media type object of the feed."""

_ENCODER = msgspec.json.Encoder(enc_hook=vars)


class CandidateText(BaseModel):
    """A candidate and its text. If the candidate still runs, the text is its last part."""

    index: int
    text: str
    num_tokens: int
    """Output tokens so far. If the candidate still runs, the count ends with the last token of the text."""
    offset: int = 0
    """Output tokens before the text."""
    end: End | Literal["running"]
    score: float | None = None
    success_probability: float | None = None
    reward: float | None = None
    reward_status: str | None = None
    selected: bool
    """True if the candidate is among the trajectories."""


class GroupTexts(BaseModel):
    """The prompt of a group and the texts of its candidates."""

    prompt_id: str
    prompt: str
    candidates: list[CandidateText]


def event_of(name: str, data: Any) -> bytes:
    """A server-sent event. `data` may contain pydantic models."""
    assert name in NAMES
    return b"event: %s\ndata: %s\n\n" % (name.encode(), _ENCODER.encode(data))

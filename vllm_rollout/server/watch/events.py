"""The events of the feed, live and of a file, and what else a viewer may read."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import BaseModel

from vllm_rollout.trace.rows import End

NAMES = ("server", "rollout", "group", "rewards", "ranks", "round", "sessions", "gone")
COMMENT = b": \n\n"
"""Says nothing but that the connection is there."""
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
    """A candidate, and what it said; of one that still runs the last part of it."""

    index: int
    text: str
    num_tokens: int
    """What it has; of one that runs, with the last token of the text."""
    offset: int = 0
    """Tokens before the text."""
    end: End | Literal["running"]
    score: float | None = None
    success_probability: float | None = None
    reward: float | None = None
    reward_status: str | None = None
    selected: bool
    """It is among the trajectories."""


class GroupTexts(BaseModel):
    """A group's candidates side by side."""

    prompt_id: str
    prompt: str
    candidates: list[CandidateText]


def event_of(name: str, data: Any) -> bytes:
    """A server-sent event; models of pydantic may be in `data`."""
    assert name in NAMES
    return b"event: %s\ndata: %s\n\n" % (name.encode(), _ENCODER.encode(data))

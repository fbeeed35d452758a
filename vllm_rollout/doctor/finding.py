"""What a check found."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "warning", "problem"]


class Finding(NamedTuple):
    what: str
    level: Level
    found: str
    """What was found. With what to do, one or two sentences."""


def ok(what: str, found: str) -> Finding:
    return Finding(what, "ok", found)

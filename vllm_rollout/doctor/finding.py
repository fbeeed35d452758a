"""The result of one check."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "warning", "problem"]


class Finding(NamedTuple):
    what: str
    level: Level
    found: str
    """The fact that was found. Together with the remedy one or two sentences."""


def ok(what: str, found: str) -> Finding:
    return Finding(what, "ok", found)

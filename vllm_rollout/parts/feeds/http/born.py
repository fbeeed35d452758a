"""Fields that a feed adds to each kind of group. Invariant: this module imports no answer."""

from __future__ import annotations

from pydantic import BaseModel


class BornFields(BaseModel):
    """Fields of a group that its feed adds."""

    born: int
    """Weights updates of the feed before the group started."""
    born_version: str | None
    """Name of the weights when the group got its place. Its tokens are of these weights or of newer ones. Null if
    they had no name."""
    staleness: int
    """Weights updates between the start of the group and its batch."""

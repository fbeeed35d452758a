"""Fields that a feed adds to each kind of group. Invariant: this module imports no answer."""

from __future__ import annotations

from pydantic import BaseModel


class BornFields(BaseModel):
    """Fields of a group that its feed adds."""

    born: int
    """Weights updates of the feed before the group started."""
    born_version: str | None
    """Name of the weights with which the group started. Null if they had none."""
    staleness: int
    """Weights updates between the start of the group and its batch."""

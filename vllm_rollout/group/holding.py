"""Who keeps a rank empty.

Invariant: a rank that somebody keeps empty is held, whoever else gave it back.
"""

from __future__ import annotations

TRAINER = "trainer"
"""Whoever drains over HTTP. Other owners are rollouts, by id, which free ranks until they are over."""
EVERYBODY = ""
"""To give a rank back in the name of all who keep it empty."""


class Holders:
    """Of one rank."""

    def __init__(self) -> None:
        self._owners: set[str] = set()

    def __bool__(self) -> bool:
        """Somebody does."""
        return bool(self._owners)

    def change(self, owner: str, *, held: bool) -> None:
        """Whether this owner does, from now on."""
        if held:
            self._owners.add(owner)
        elif owner == EVERYBODY:
            self._owners.clear()
        else:
            self._owners.discard(owner)

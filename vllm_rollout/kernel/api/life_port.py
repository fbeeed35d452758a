"""The port of parts by which a server outlives a rank: the face `life`.

Invariant: without such a part the server ends with its first rank, as vLLM does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Death(NamedTuple):
    """Death of an engine core."""

    rank: int
    exit_code: int
    """Exit code as in `multiprocessing`: a negative value is the number of a signal."""


class LifePart:
    """A part that sees ranks die, or takes over what ran there.

    Its face `life` is a function that makes it of an engine client (`WatchedClient`), and returns None if the part has
    nothing to do there.
    """

    def deaths(self) -> Sequence[Death]:
        """Ranks that have died so far, while others live on."""
        return ()

    def died(self, death: Death) -> None:
        """A rank has died. From now on nothing is sent to it, and no call waits for it."""

    def requests_of(self, rank: int) -> Iterable[str]:
        """Ids of requests in flight at a dead rank. They fail next."""
        return ()

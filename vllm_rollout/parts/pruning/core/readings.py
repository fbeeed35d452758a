"""Data that API processes read in pieces, because writing all of it at once would stop the engine for too long.

Invariant: a piece is made in bounded time. At most `MAX_READINGS` readings are open: a new one replaces the oldest.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from vllm_rollout.config import CALL_BUDGET_S
from vllm_rollout.parts.pruning.calls import Piece

MAX_READINGS = 8
"""One per API process that reads."""
MAX_PIECE_BYTES = 2**20
"""Limit of a piece in bytes. More is copied in the next call."""


class Readings:
    """Open readings, by reader. Parts are made as they are read, each in well under a call's time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, budget_s: float = CALL_BUDGET_S) -> None:
        self._clock = clock
        self._budget_s = budget_s
        self._open: OrderedDict[str, Iterator[bytes]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, reader: str, parts: Iterator[bytes]) -> None:
        """Begin a new reading for this reader. It replaces the reader's earlier one."""
        self._open.pop(reader, None)
        self._open[reader] = parts
        if len(self._open) > MAX_READINGS:
            self._open.popitem(last=False)

    def read(self, reader: str) -> Piece | None:
        """The next piece. None if the reader has nothing open."""
        parts = self._open.get(reader)
        if parts is None:
            return None
        deadline = self._clock() + self._budget_s
        piece: list[bytes] = []
        num_bytes = 0
        for part in parts:
            piece.append(part)
            num_bytes += len(part)
            if num_bytes >= MAX_PIECE_BYTES or self._clock() >= deadline:
                return Piece(b"".join(piece), is_last=False)
        del self._open[reader]
        return Piece(b"".join(piece), is_last=True)

"""The learned state as bytes: a header, the memory's rows and the heads, so that it can be written in parts.

    {"format": 2, "model": ...}     one line of JSON, as are:
    ["learning", ...] ...           the rows of `parts/pruning/rules/memory.py`
    ["head", num_bytes]             then so many bytes: a quality head's state
    ["head", num_bytes, adapter]    the same, of an adapter's head
    ["end", num_heads]

Invariant: bytes that are read have this form. Otherwise a ValueError says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import msgspec

from vllm_rollout.checks import integer, listed, shown, text
from vllm_rollout.config import MAX_ADAPTERS
from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.parts.pruning.rules.memory import MAX_DETECTION_LENGTHS

FORMAT = 2
HEAD = "head"
END = "end"
MAX_MODEL_CHARS = 4096


MAX_LINE_BYTES = 2**23
"""Longest row in bytes: eight times the largest that is written. This keeps a small file from becoming a
large object.
"""


class SavedHead(NamedTuple):
    adapter: str
    data: bytes


class SavedState(NamedTuple):
    model: str
    rows: Iterator[Any]
    """Rows of the memories, unchecked, read as they are taken. Raises: ValueError."""
    heads: Callable[[Collection[str]], list[SavedHead]]
    """Reads the heads of these adapters. Call it once the rows have been taken. Raises: ValueError."""


def state_header(model: str) -> dict[str, Any]:
    return {"format": FORMAT, "model": model}


def head_line(num_bytes: int, adapter: str) -> list[Any]:
    """The line before the bytes of a head."""
    return [HEAD, num_bytes] if adapter == BASE_MODEL else [HEAD, num_bytes, adapter]


def parse_state(data: bytes) -> SavedState:
    """Parse a state. Raises: ValueError."""
    lines = _Lines(data)
    kind = lines.next(_Header)
    if kind.format != FORMAT:
        raise ValueError(f"format must be {FORMAT}, got {kind.format}")
    return SavedState(text(kind.model, "model of a state", MAX_MODEL_CHARS), lines.rows(), lines.heads)


def _decoded(line: memoryview, type: Any) -> Any:
    """Parse a line as `type`. Raises: ValueError."""
    try:
        return msgspec.json.decode(line, type=type)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"a line of it is not what it should be: {error}") from error


class _Header(msgspec.Struct):
    format: int
    model: str = ""


class _Lines:
    """Lines of JSON, and the heads' bytes after them."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._after_rows: Any = None
        """The line that ended the rows."""

    def next(self, type: Any = Any) -> Any:
        """The next line, parsed as `type`. Raises: ValueError."""
        if self._at == len(self._data):
            raise ValueError("it was cut off: its end is missing")
        end = self._data.find(b"\n", self._at)
        end = len(self._data) if end < 0 else end
        line = memoryview(self._data)[self._at : end]
        self._at = min(end + 1, len(self._data))
        if type is Any and line.nbytes > MAX_LINE_BYTES:
            raise ValueError(f"a row has at most {MAX_LINE_BYTES} bytes, got {line.nbytes}")
        return _decoded(line, type)

    def rows(self) -> Iterator[Any]:
        while True:
            match self.next():
                case [kind, _, *_] as line if kind in (HEAD, END):
                    self._after_rows = line
                    return
                case row:
                    yield row

    def heads(self, adapters: Collection[str]) -> list[SavedHead]:
        heads: list[SavedHead] = []
        line = self._after_rows
        while line[0] == HEAD:
            _, num_bytes, adapter = [*line, BASE_MODEL][:3]
            if len(line) > 3 or adapter not in adapters:
                raise ValueError(f"a head is of the base model, or of an adapter that has rows, got {shown(line)}")
            size = integer(num_bytes, "size of a head", 1, len(self._data))
            if self._at + size > len(self._data):
                raise ValueError(f"it was cut off within a head of {size} bytes")
            heads.append(SavedHead(adapter, self._data[self._at : self._at + size]))
            self._at += size
            listed(heads, "heads of a state", MAX_DETECTION_LENGTHS * (1 + MAX_ADAPTERS))
            line = self.next()
            if not isinstance(line, list) or len(line) < 2:
                raise ValueError(f"a line after a head must be a list of 2, got {shown(line)}")
        if line != [END, len(heads)] or self._at != len(self._data):
            raise ValueError(f"a state ends after its {len(heads)} heads, got {shown(line)} or more after it")
        return heads

"""All that was learned as bytes: a header, the memory's rows and the heads, so that it can be written in parts.

    {"format": 2, "model": ...}     one line of JSON, as are:
    ["learning", ...] ...           the rows of `group/memory.py`
    ["head", num_bytes]             then so many bytes: a quality head's state
    ["end", num_heads]

Format 1 was one object of JSON, its heads in base64.

Invariant: what is read was written so, or it is a ValueError that says what is wrong.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from vllm_rollout.config import MAX_DETECTION_LENGTHS
from vllm_rollout.group.checks import integer, listed, shown, text
from vllm_rollout.group.memory import FORMAT, rows_of_format_1

HEAD = "head"
END = "end"
MAX_MODEL_CHARS = 4096


class SavedState(NamedTuple):
    model: str
    rows: Iterable[Any]
    """Of the memory, unchecked."""
    heads: list[bytes]


def state_header(model: str) -> dict[str, Any]:
    return {"format": FORMAT, "model": model}


def parse_state(data: bytes) -> SavedState:
    """Raises: ValueError."""
    lines = _Lines(data)
    header = lines.next()
    if not isinstance(header, Mapping) or "format" not in header:
        raise ValueError(f"a state begins with an object that has a format, got {shown(header)}")
    if header["format"] == 1:
        return _format_1(header)
    if header["format"] != FORMAT:
        raise ValueError(f"format must be 1 or {FORMAT}, got {shown(header['format'])}")
    rows, heads = [], []
    while True:
        match lines.next():
            case [kind, size] if kind == HEAD:
                heads.append(lines.bytes(integer(size, "size of a head", 1, len(data))))
            case [kind, num_heads] if kind == END:
                break
            case row if heads:
                raise ValueError(f"heads come last in a state, then came {shown(row)}")
            case row:
                rows.append(row)
    if num_heads != len(heads) or not lines.is_over:
        raise ValueError(f"a state ends after {len(heads)} heads, but its end says {shown(num_heads)} or more follows")
    return SavedState(_model(header), rows, _few(heads))


def _format_1(state: Mapping[str, Any]) -> SavedState:
    heads = []
    for head in _few(listed(state.get("heads"), "heads of a state")):
        if not isinstance(head, str):
            raise ValueError(f"a head of a state must be base64, got {shown(head)}")
        heads.append(b64decode(head, validate=True))
    return SavedState(_model(state), list(rows_of_format_1(state)), heads)


def _model(header: Mapping[str, Any]) -> str:
    return text(header.get("model"), "model of a state", MAX_MODEL_CHARS)


def _few(heads: Any) -> Any:
    return listed(heads, "heads of a state", MAX_DETECTION_LENGTHS)


class _Lines:
    """Lines of JSON with bytes in between."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_over(self) -> bool:
        return self._at == len(self._data)

    def next(self) -> Any:
        """Raises: ValueError."""
        if self.is_over:
            raise ValueError("it was cut off: its end is missing")
        end = self._data.find(b"\n", self._at)
        end = len(self._data) if end < 0 else end
        line = memoryview(self._data)[self._at : end]
        self._at = min(end + 1, len(self._data))
        try:
            return msgspec.json.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"a line of it is not JSON: {error}") from error

    def bytes(self, size: int) -> bytes:
        """Raises: ValueError."""
        if self._at + size > len(self._data):
            raise ValueError(f"it was cut off within a head of {size} bytes")
        self._at += size
        return self._data[self._at - size : self._at]

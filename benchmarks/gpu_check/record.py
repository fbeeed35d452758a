"""The file of a lease: a JSON object per line, on disk before the next one is made.

Invariant: lines are only added, so that a killed program leaves all its measurements, and the next one continues.

| kind | fields |
|---|---|
| begin | command, versions, hardware, device, minutes |
| import | seconds: of torch, or vLLM |
| start | engine, seconds |
| value | piece, and the measurements of one repeat |
| check | piece, what, passed, value, wanted |
| result | piece, name, value: a result of the piece; the last line of a name counts |
| end | piece, sources, status (passed, failed, error, timeout, skipped), seconds, reason |
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DONE = frozenset({"passed", "failed"})
"""Statuses after which a piece is not run again with the same sources."""


class Record:
    """The file `lease.jsonl`. Any process of the lease may write to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, "at": round(time.time(), 3), **fields})
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            torn = (size := os.fstat(descriptor).st_size) and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, (b"\n" if torn else b"") + line.encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lines(self) -> Iterator[dict[str, Any]]:
        """The lines that can be read. A kill may have left an incomplete line."""
        if not self.path.exists():
            return
        for line in self.path.read_text(errors="replace").splitlines():
            try:
                found = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(found, dict) and "kind" in found:
                yield found

    def ended(self, piece: str, sources: str) -> str | None:
        """Status of the piece's last run with these sources, `passed` or `failed`. None if the piece has to run."""
        found = None
        for line in self.lines():
            if line["kind"] == "end" and line["piece"] == piece and line["sources"] == sources:
                found = line["status"] if line["status"] in DONE else found
        return found

"""The environment of a piece: a device, its engines, and the file for its results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu_check.engine import Engine
from benchmarks.gpu_check.models import Models
from benchmarks.gpu_check.record import Record

Device = Literal["cuda", "cpu"]


@dataclass
class Bench:
    """Device, engines and record of one piece."""

    piece: str
    device: Device
    folder: Path
    """Folder for outputs."""
    models: Models
    record: Record
    log: int
    """File descriptor for the output of engines."""
    engines: Mapping[str, Engine] = field(default_factory=dict)
    ends_at: float = float("inf")
    """End of the piece's time, on time.monotonic."""
    num_checks: int = 0
    all_passed: bool = True

    @property
    def small(self) -> bool:
        """True in a rehearsal: sizes are small, and speeds are not judged."""
        return self.device == "cpu"

    def value(self, **fields: Any) -> None:
        """Write the measurement of one repeat."""
        self.record.write("value", piece=self.piece, **fields)

    def result(self, name: str, value: Any) -> None:
        """Write a result so far."""
        self.record.write("result", piece=self.piece, name=name, value=value)

    def check(self, what: str, passed: bool, value: Any = None, wanted: Any = None) -> None:
        """Write a check, which must hold for the piece to pass."""
        self.num_checks += 1
        self.all_passed &= bool(passed)
        self.record.write("check", piece=self.piece, what=what, passed=bool(passed), value=value, wanted=wanted)

    def speed(self, what: str, passed: bool, value: Any, wanted: Any) -> None:
        """Write a check that a rehearsal does not judge."""
        self.check(what, passed or self.small, value, wanted)

    def time_for_another(self, seconds_of_one: float) -> bool:
        """True if one more repeat fits into the piece's time, with a tenth to spare."""
        return time.monotonic() + 1.1 * seconds_of_one < self.ends_at

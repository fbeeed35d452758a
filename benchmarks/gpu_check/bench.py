"""What a piece is given: a device, its engines, and where to write what it finds."""

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
    """One piece's."""

    piece: str
    device: Device
    folder: Path
    """Where outputs go."""
    models: Models
    record: Record
    log: int
    """A file descriptor for what engines say."""
    engines: Mapping[str, Engine] = field(default_factory=dict)
    ends_at: float = float("inf")
    """On time.monotonic: when its time is over."""
    num_checks: int = 0
    all_passed: bool = True

    @property
    def small(self) -> bool:
        """A rehearsal: sizes are small, and speeds are not judged."""
        return self.device == "cpu"

    def value(self, **fields: Any) -> None:
        """What one repeat measured."""
        self.record.write("value", piece=self.piece, **fields)

    def result(self, name: str, value: Any) -> None:
        """What is concluded so far."""
        self.record.write("result", piece=self.piece, name=name, value=value)

    def check(self, what: str, passed: bool, value: Any = None, wanted: Any = None) -> None:
        """One thing that must hold."""
        self.num_checks += 1
        self.all_passed &= bool(passed)
        self.record.write("check", piece=self.piece, what=what, passed=bool(passed), value=value, wanted=wanted)

    def speed(self, what: str, passed: bool, value: Any, wanted: Any) -> None:
        """A check that a rehearsal does not judge."""
        self.check(what, passed or self.small, value, wanted)

    def time_for_another(self, seconds_of_one: float) -> bool:
        """Whether one more repeat fits into the piece's time, with a tenth to spare."""
        return time.monotonic() + 1.1 * seconds_of_one < self.ends_at

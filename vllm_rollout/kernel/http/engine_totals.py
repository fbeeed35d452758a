"""Counters that show what an engine has counted since it started.

Invariant: a counter never falls, and each event counts once, although every API process reads the same numbers.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from prometheus_client import Counter
from prometheus_client.multiprocess import MultiProcessCollector

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Set by vLLM for a server with several API processes: the folder where each of them keeps its counters."""

Series = tuple[str, tuple[tuple[str, str], ...]]
"""Name of a sample, and its labels in order."""


class Reading(NamedTuple):
    counter: Counter
    labels: Mapping[str, str]
    total: float
    """The engine's own number."""

    @property
    def series(self) -> Series:
        (metric,) = self.counter.describe()
        return f"{metric.name}_total", tuple(sorted(self.labels.items()))


class EngineTotals:
    """The counters of one API process."""

    def __init__(self) -> None:
        self._largest: dict[Series, float] = defaultdict(float)
        """The largest number of the engine that runs."""
        self._before: dict[Series, float] = defaultdict(float)
        """The sum over engines that were replaced."""
        self._counted: dict[Series, float] = defaultdict(float)
        """The part of each counter that this process has added."""

    def read(self, readings: Iterable[Reading]) -> None:
        """Add what no API process has counted yet."""
        counted = _counted_by_all()
        for reading in readings:
            series = reading.series
            largest = self._largest[series] = max(self._largest[series], reading.total)
            known = max(self._counted[series], counted.get(series, 0.0))
            uncounted = max(0.0, self._before[series] + largest - known)
            self._counted[series] += uncounted
            (reading.counter.labels(**reading.labels) if reading.labels else reading.counter).inc(uncounted)

    def engine_replaced(self) -> None:
        """A new engine counts from zero."""
        for series, largest in self._largest.items():
            self._before[series] += largest
        self._largest.clear()


def _counted_by_all() -> dict[Series, float]:
    """The counters of all API processes; empty for a server with one."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return {}
    files = [str(file) for file in Path(folder).glob("counter_*.db") if file.stat().st_size]  # empty: just made
    metrics = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for metric in metrics
        for sample in metric.samples
    }

"""Resident memory of a process and all its children. Source: /proc."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

SAMPLE_INTERVAL_S = 1.0
WARM_UP_SHARE = 0.3
"""Share of a soak in which buffers, caches and rings fill up. Growth is counted from the second half of it on."""
END_SHARE = 0.1

MIB = 2**20


def resident_mib(pid: int) -> dict[str, float]:
    """RSS of the process and its descendants by pid and name, in MiB."""
    found = {}
    for process in (root := psutil.Process(pid), *root.children(recursive=True)):
        try:
            found[f"{process.pid} {process.name()}"] = process.memory_info().rss / MIB
        except psutil.NoSuchProcess:
            continue
    return found


@dataclass(slots=True)
class MemorySamples:
    """RSS over the time of a soak, in MiB."""

    total: list[float] = field(default_factory=list)
    by_process: dict[str, list[float]] = field(default_factory=dict)

    async def take(self, pid: int, until: Callable[[], bool]) -> None:
        while not until():
            self.add(resident_mib(pid))
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    def add(self, sample: Mapping[str, float]) -> None:
        self.total.append(sum(sample.values()))
        for name, mib in sample.items():
            self.by_process.setdefault(name, []).append(mib)

    @property
    def growth_by_process(self) -> dict[str, float]:
        """Growth in MiB of processes that ran all the time. "API" is the process that listens."""
        lasting = {name: mib for name, mib in self.by_process.items() if len(mib) == len(self.total)}
        names = ["API", *(name.partition(" ")[2] for name in list(lasting)[1:])]
        return {
            f"{i} {name}": round(growth_mib(mib), 1)
            for i, (name, mib) in enumerate(zip(names, lasting.values(), strict=True))
        }


def growth_mib(samples: Sequence[float]) -> float:
    """Growth in MiB from after the warm-up to the end, between medians of a tenth of the samples or more."""
    warm = samples[int(len(samples) * WARM_UP_SHARE / 2) : int(len(samples) * WARM_UP_SHARE) + 1]
    end = samples[-max(1, int(len(samples) * END_SHARE)) :]
    return statistics.median(end) - statistics.median(warm)

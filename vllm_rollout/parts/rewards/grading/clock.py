"""Measures a process's time at work, without the time for which it waited for a free core.

Wall time is too long on a busy machine: a run that needs 1 s takes 3 s if two others want the same core. CPU time is
too short for a run that hangs. Linux counts how long a ready thread had no core (`/proc/PID/schedstat`), and this
module subtracts that from the wall time. Elsewhere the wall time counts.
"""

from __future__ import annotations

import time
from contextlib import suppress

from vllm_rollout.parts.rewards.grading.family import descendants

MAX_STRETCH = 10.0
"""Factor on a limit that wall time may reach, however busy the machine is. A program may make the machine busy by
itself."""


class WorkClock:
    """Clock that begins when it is made. `pid`: the process. Processes that it starts count, too."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began = time.monotonic()
        self.started: list[int] = []
        """Ids of the processes that it had started at the last look."""
        self._at_first = self._waits()
        self._waited_s = 0.0

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def work_s(self) -> float:
        """Wall seconds minus the longest wait for a core of any process of the tree."""
        for pid, waited_s in self._waits().items():
            self._waited_s = max(self._waited_s, waited_s - self._at_first.get(pid, 0.0))
        return max(0.0, self.wall_s - self._waited_s)

    def left_s(self, limit_s: float) -> float:
        """Seconds until the limit is passed at the earliest. 0 or less if it is passed."""
        return min(limit_s - self.work_s, MAX_STRETCH * limit_s - self.wall_s)

    def _waits(self) -> dict[int, float]:
        """Seconds that each process of the tree has waited for a core, by process id."""
        waits = {}
        self.started = descendants(self._pid)
        for pid in (self._pid, *self.started):
            with suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/schedstat") as said:
                waits[pid] = int(said.read().split()[1]) / 1e9
        return waits

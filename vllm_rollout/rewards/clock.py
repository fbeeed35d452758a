"""How long a process has been at work, without the time for which it waited for a free core.

A run that needs 1 s takes 3 s of wall time where two others want the same core, and a run that hangs takes no CPU time
at all: neither tells a slow program from a busy machine. What Linux says of a thread that was ready and had no core
(`/proc/PID/schedstat`) does, so that is taken off the wall time. Elsewhere the wall time counts.
"""

from __future__ import annotations

import time
from contextlib import suppress

from vllm_rollout.rewards.family import descendants

MAX_STRETCH = 10.0
"""Times a limit that wall time may reach, however busy the machine is: a program may make it so by itself."""


class WorkClock:
    """Begins when it is made. `pid`: of the process; what it starts counts too."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began = time.monotonic()
        self.started: list[int] = []
        """The process ids of what it had started when it was last looked at."""
        self._at_first = self._waits()
        self._waited_s = 0.0

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def work_s(self) -> float:
        """Seconds without waiting for a core: the longest wait of any process of the tree is taken off."""
        for pid, waited_s in self._waits().items():
            self._waited_s = max(self._waited_s, waited_s - self._at_first.get(pid, 0.0))
        return max(0.0, self.wall_s - self._waited_s)

    def left_s(self, limit_s: float) -> float:
        """Until that limit is passed, at the earliest; 0 or less when it is."""
        return min(limit_s - self.work_s, MAX_STRETCH * limit_s - self.wall_s)

    def _waits(self) -> dict[int, float]:
        """Seconds that each process of the tree has waited, by process id."""
        waits = {}
        self.started = descendants(self._pid)
        for pid in (self._pid, *self.started):
            with suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/schedstat") as said:
                waits[pid] = int(said.read().split()[1]) / 1e9
        return waits

"""One file for the output of all engines, of bounded size.

Invariant: the end of the output is in the file, also when its writers are killed, and no writer ever waits for a full
disk.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

MOST_BYTES = 8 << 20
"""Size limit of the file. The size of outputs from a cluster may be limited."""


class LogFile:
    """A log file. Processes write to `descriptor`, and a process of its own writes the file."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self.descriptor = -1

    def __enter__(self) -> LogFile:
        reading, self.descriptor = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self.descriptor)
            os.setpgid(0, 0)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with suppress(BaseException):
                keep(reading, self._path, self._most_bytes)
            os._exit(0)
        os.close(reading)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.descriptor)
        os.waitpid(self._pid, 0)


def keep(reading: int, path: Path, most_bytes: int) -> None:
    """Append what comes until no writer is left. A file that is too long loses its older half."""
    with path.open("ab", buffering=0) as file:
        while said := os.read(reading, 1 << 16):
            with suppress(OSError):
                file.write(said)
                if file.tell() > most_bytes:
                    rest = path.read_bytes()[-most_bytes // 2 :]
                    file.truncate(0)
                    file.write(b"... older lines are gone ...\n" + rest)

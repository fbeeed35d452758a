"""A lock on the folder of --rollout-state, for one server at a time. Two servers would remove each other's files.

Invariant: a server that was killed leaves its folder free. The lock belongs to its process alone (POSIX). An engine
core that was forked from it, and outlives it for a moment, does not hold the lock.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from vllm_rollout.private_file import open_private

NAME = "server.lock"


class FolderTaken(RuntimeError):
    """Another server holds the folder."""


class FolderLock:
    """Holds a folder until it is released, or its process ends.

    A process locks a folder only once: closing any file of that name would release the lock.
    """

    def __init__(self, folder: Path) -> None:
        """Lock the folder. Raises: FolderTaken, OSError."""
        self._file = open_private(folder / NAME, os.O_RDWR)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._file, 32, 0).decode(errors="replace").strip()
            os.close(self._file)
            if not isinstance(error, BlockingIOError | PermissionError):
                raise
            raise FolderTaken(
                f"--rollout-state {folder} belongs to a server that runs, process {holder or 'unknown'}. Stop that "
                "server, or name another folder: each server needs its own."
            ) from error
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._file)

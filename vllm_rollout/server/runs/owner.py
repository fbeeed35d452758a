"""Which process has a round in its hands. Invariant: a process that is gone owns nothing, however it went."""

from __future__ import annotations

import fcntl
import os
import uuid
from pathlib import Path


class Owner:
    """This process, among those that share a folder: a lock that the kernel drops when the process ends."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` None: nobody shares anything with this process."""
        self.name = uuid.uuid4().hex
        self._folder = folder
        self._file: int | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            self._file = _locked(folder / self.name)

    def is_alive(self, name: str) -> bool:
        """Whether the process of that name, or this one, still runs."""
        if name == self.name:
            return True
        if self._folder is None:
            return False
        try:
            file = os.open(self._folder / name, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            (self._folder / self.name).unlink(missing_ok=True)
            self._file = None

    def _sweep(self) -> None:
        """Remove what processes that are gone have left."""
        for path in self._folder.iterdir():
            if not self.is_alive(path.name):
                path.unlink(missing_ok=True)


def _locked(path: Path) -> int:
    """A new file, locked. One that starts at the same moment may take it for left over: then it is made again."""
    while True:
        file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists() and path.stat().st_ino == os.fstat(file).st_ino:
            return file
        os.close(file)

"""Which process has a round in its hands. Invariant: a process that is gone owns nothing, however it went, and one that
runs owns what it has.

Each process has a file of its own, with an exclusive lock that the kernel drops when the process ends. What keeps a
file from being removed under a process that starts: it is removed only by who has its lock, and who gets a lock looks
whether it is that of the file that has the name now.
"""

from __future__ import annotations

import fcntl
import os
import re
import uuid
from pathlib import Path

from vllm_rollout.private_file import open_private, private_folder

_NAME = re.compile("[0-9a-f]{32}")


class Owner:
    """This process, among those that share a folder."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` None: nobody shares anything with this process."""
        self.name = uuid.uuid4().hex
        self._folder = folder
        self._file: int | None = None
        if folder is not None:
            private_folder(folder)
            _sweep(folder)
            self._file = _locked(folder / self.name)

    def is_alive(self, name: str) -> bool:
        """Whether the process of that name, or this one, still runs. One that is gone may seem to run for the moment in
        which another one starts and removes its file."""
        if name == self.name:
            return True
        if self._folder is None or not _NAME.fullmatch(name):
            return False
        path = self._folder / name
        while True:
            try:
                file = os.open(path, os.O_RDWR)
            except FileNotFoundError:
                return False
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others may ask at the same time
                if _is_at(path, file):
                    return False
            except BlockingIOError:
                return True
            finally:
                os.close(file)

    def close(self) -> None:
        if self._folder is not None and self._file is not None:
            (self._folder / self.name).unlink(missing_ok=True)
            os.close(self._file)
            self._file = None


def _sweep(folder: Path) -> None:
    """Remove what processes that are gone have left."""
    for path in folder.iterdir():
        try:
            file = os.open(path, os.O_RDWR)
        except FileNotFoundError:  # another one that starts was quicker
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, file):
                path.unlink()
        except BlockingIOError:
            pass
        finally:
            os.close(file)


def _locked(path: Path) -> int:
    """A new file, locked. One that starts at the same moment may take it for left over: then it is made again."""
    while True:
        file = open_private(path, os.O_RDWR)
        fcntl.flock(file, fcntl.LOCK_EX)
        if _is_at(path, file):
            return file
        os.close(file)


def _is_at(path: Path, file: int) -> bool:
    """Whether an open file is the one that has this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False

"""Ownership of rounds by processes. Invariant: a process that has ended owns nothing, however it ended. A running
process keeps its rounds.

Each process has a file with an exclusive lock, which the kernel drops when the process ends. A file must not be removed
under a process that starts. So only the holder of its lock removes a file. A process that gets a lock checks that its
file still has the name.
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
        """`folder`: None if no other process shares data with this one."""
        self.name = uuid.uuid4().hex
        self._folder = folder
        self._file: int | None = None
        if folder is not None:
            private_folder(folder)
            _sweep(folder)
            self._file = _locked(folder / self.name)

    def is_alive(self, name: str) -> bool:
        """True if the process of that name still runs. A process that has ended may seem to run while another one
        starts and removes its file."""
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
    """Remove the files of processes that have ended."""
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
    """A new locked file. Another process that starts may remove it as a leftover. Then it is made again."""
    while True:
        file = open_private(path, os.O_RDWR)
        fcntl.flock(file, fcntl.LOCK_EX)
        if _is_at(path, file):
            return file
        os.close(file)


def _is_at(path: Path, file: int) -> bool:
    """True if the open file is the one that has this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False

"""Files that tell what clients have said, or what was learned of it: only their owner reads them, whatever the umask.

Invariant: a folder that was there keeps its mode, since others may need it; our files in it are 0600 all the same.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

FILE, FOLDER = 0o600, 0o700


def private_folder(path: Path) -> None:
    """Make it, and what is missing above it. Raises: OSError."""
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            folder.mkdir(FOLDER, exist_ok=True)


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """As an `opener` of `open`: makes the file if need be, and takes it from all others. Raises: OSError."""
    file = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, FILE)
    narrow(file)
    return file


def narrow(file: int | Path) -> None:
    """Take a file of ours that an earlier version has written from all others. Raises: OSError."""
    status = os.stat(file)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_mode & 0o077:
        os.chmod(file, FILE)

"""Files with clients' data, or with what was learned from it: only their owner reads them, whatever the umask.

Invariant: an existing folder keeps its mode, since other users may need it. Our files in it are 0600 all the same.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

FILE, FOLDER = 0o600, 0o700


def private_folder(path: Path) -> None:
    """Make the folder and its missing parents. Raises: OSError."""
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            folder.mkdir(FOLDER, exist_ok=True)


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """An `opener` for `open`: makes the file if needed, and makes it readable by its owner only. Raises: OSError."""
    file = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, FILE)
    narrow(file)
    return file


def narrow(file: int | Path) -> None:
    """Make a file that an earlier version wrote readable by its owner only. Raises: OSError."""
    status = os.stat(file)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_mode & 0o077:
        os.chmod(file, FILE)

"""Files that are whole at every moment.

Invariant: a reader finds the old content or the new one, never a part.
"""

from __future__ import annotations

import glob
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from vllm_rollout.private_file import FILE

PUBLIC = 0o644
"""Mode of files that a command leaves for its user, such as a profile."""
LEFT_S = 3600.0
"""Seconds after which a temporary file is one of a writer that was killed."""


def write_whole(path: Path, data: bytes, mode: int = FILE) -> None:
    """Replace the file's content at once, even if the program or machine fails meanwhile. Raises: OSError."""
    _remove_left(path)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # or a power failure could take the new name away
        finally:
            os.close(folder)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _remove_left(path: Path) -> None:
    """Remove temporary files that killed writers of the same file have left."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.????????"):
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > LEFT_S:
                left.unlink()

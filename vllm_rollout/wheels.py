"""Files from wheels of the registry, fetched by pip with its settings on this machine.

Invariant: no code of a wheel runs.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

CHUNK_BYTES = 1 << 20
LAST_LINES = 3
"""Number of lines of pip's error output that are shown."""


def download(package: str, folder: Path) -> Path:
    """The wheel of a pinned package, put into an empty folder.

    Raises: OSError if no space is left, else RuntimeError if pip fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Wheels only: a source distribution would run its own code here.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), package]
    # pip unpacks there, too, so that only one place needs free space.
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TMPDIR": str(folder)})
    if done.returncode != 0:
        raise_if_full(done.stderr)
        said = "\n".join(done.stderr.strip().splitlines()[-LAST_LINES:])
        raise RuntimeError(
            f"pip could not download {package}: {said}\n"
            "Check the network and pip's index settings (`pip config list`), or name a local one instead."
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def raise_if_full(said: str) -> None:
    """Raises: OSError if no space was left for a child process. `said`: its error output."""
    if (reason := os.strerror(errno.ENOSPC)) in said:
        raise OSError(errno.ENOSPC, reason)


def read_member(wheel: Path, pattern: str) -> Iterator[bytes]:
    """The one file in a wheel that matches a glob, in pieces. Raises: RuntimeError unless there is exactly one."""
    with zipfile.ZipFile(wheel) as archive:
        members = fnmatch.filter(archive.namelist(), pattern)
        if len(members) != 1:
            raise RuntimeError(
                f"{wheel.name} must hold exactly one {pattern}, got {members}. Name a local one instead."
            )
        with archive.open(members[0]) as member:
            while chunk := member.read(CHUNK_BYTES):
                yield chunk

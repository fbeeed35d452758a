"""Runs in the sandbox before any program of a policy, and tries each thing that a program must not reach.

It prints `closed` if nothing works. Its argument is JSON: see `Tries`. It is copied into the sandbox, which has none of
our modules: standard library only.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any, TypedDict

AF_VSOCK, PR_FUTEX_HASH, HUGE_PAGES = 40, 78, 0x40000


class Tries(TypedDict):
    files: list[str]
    """Files of the server, which must not be visible."""
    abstract_socket: str
    """Address at which the server listens, in the server's own network namespace."""
    limits: dict[str, int]
    """Largest allowed limit, by the name of a resource of `resource`."""
    max_inodes: int
    calls: dict[str, tuple[int, int]]
    """Number and required error of each system call that must be refused, by name."""


def main(tries: Tries) -> None:
    attempts: dict[str, Callable[[], Any]] = {
        "the network": lambda: socket.socket(socket.AF_UNIX).connect("\0" + tries["abstract_socket"]),
        "the hypervisor": lambda: socket.socket(AF_VSOCK),
        "memory that nobody counts": lambda: os.memfd_create("probe"),
        "shared memory that nobody counts": lambda: mmap.mmap(-1, mmap.PAGESIZE),
        "shared memory by /dev/zero": lambda: mmap.mmap(os.open("/dev/zero", os.O_RDWR), mmap.PAGESIZE),
        "huge pages": lambda: mmap.mmap(-1, 1 << 21, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | HUGE_PAGES),
        "a table of futexes": lambda: _done(ctypes.CDLL(None, use_errno=True).prctl(PR_FUTEX_HASH, 1, 16, 0, 0)),
        "terminals": os.openpty,
        "the folder of its program": lambda: os.symlink("probe", "/program/probe"),
    }
    seen = [name for name in tries["files"] if os.path.exists(name)]
    if os.getppid() != 1:
        seen.append("other processes")
    for name, limit in tries["limits"].items():
        if not 0 <= resource.getrlimit(getattr(resource, name))[1] <= limit:
            seen.append(f"more than {name} {limit}")
    seen += [f"all inodes of {each}" for each in ("/tmp", "/dev/shm") if _has_more(each, tries["max_inodes"])]
    seen += [name for name, attempt in attempts.items() if _works(attempt)]
    seen += [name for name, call in tries["calls"].items() if _is_open(*call)]
    print("reaches " + ", ".join(seen) if seen else "closed")


def _done(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")


def _works(attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True


def _has_more(folder: str, max_inodes: int) -> bool:
    return not 0 < os.statvfs(folder).f_files <= max_inodes


def _is_open(number: int, error: int) -> bool:
    """True if a system call works. With invalid arguments, a call that works gives another error than a refused one."""
    library = ctypes.CDLL(None, use_errno=True)
    result = library.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
    return bool(result != -1 or ctypes.get_errno() != error) if error else bool(result)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
